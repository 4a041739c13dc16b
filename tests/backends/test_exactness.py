"""Whether drafts change text. Seen red: spoiled slots left right, the answer taken of another request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.backends.dummy import Models, build_dummy
from outrider.backends.exactness import SpoiledProposer, answer_all, check_exact
from outrider.backends.local import make_engine
from outrider.core import SamplingParams
from outrider.engine.engine import EngineConfig
from outrider.kernels.ops import select_kernels
from outrider.kernels.reference import TorchKernels

CPU = torch.device("cpu")
CONFIG = EngineConfig(context_length=96, max_seats=2)
PROMPTS = [[2, *range(20, 50)], [2, *range(70, 90)]]


def tiny(kernels: object = None) -> Models:
    chosen = kernels or select_kernels("auto", dtype=torch.float32, device=CPU)
    return build_dummy("tiny", kernels=chosen, dtype=torch.float32, device=CPU, context_length=96)  # type: ignore[arg-type]


def test_row_invariant_kernels_are_exact() -> None:
    models = tiny()
    assert models.target.kernels.row_invariant
    assert check_exact(models, CONFIG, PROMPTS, draft_length=5, num_tokens=16)
    assert check_exact(models, CONFIG, PROMPTS, draft_length=0, num_tokens=8)


@pytest.mark.parametrize(
    "is_touched", [lambda rows: rows > 1, lambda rows: rows == 6], ids=["neighbours", "blocks of five drafts"]
)
def test_logits_that_depend_on_how_many_rows_there_are_do_not_pass(is_touched: Callable[[int], bool]) -> None:
    models = tiny(TorchKernels(torch.float32, CPU))
    exact = models.target.best

    def best(hidden: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = exact(hidden)
        return values, torch.where(ids % 3 == 0, 7, ids) if is_touched(len(hidden)) else ids

    models.target.best = best  # type: ignore[method-assign]
    single = replace(CONFIG, max_seats=1)
    for drafter in (None, models.drafter):
        assert not check_exact(Models(models.target, drafter), single, PROMPTS[:1], draft_length=5, num_tokens=12)


def test_every_count_of_accepted_drafts_occurs() -> None:
    models = tiny()
    plain = answer_all(make_engine(models.target, None, None, CONFIG), PROMPTS, 40)
    engine = make_engine(models.target, None, None, CONFIG)
    engine.proposer = SpoiledProposer(plain, max_draft_length=3, vocab_size=1024, tap_layers=())
    request = engine.add(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert request.output_token_ids == plain[0]
    counts = request.acceptance
    assert counts.num_accepted_tokens == pytest.approx(1.5 * counts.num_cycles, abs=4)


def test_a_text_that_nobody_knows_gets_drafts_all_the_same() -> None:
    proposer = SpoiledProposer([[5, 6, 7, 8]], max_draft_length=2, vocab_size=1024, tap_layers=())
    assert proposer._drafts((5,), 2, 2) == [6, 7]
    assert proposer._drafts((5, 6), 2, 1) == [7, 9]
    assert proposer._drafts((5, 6, 7), 2, 2) == [8, 0]
    assert proposer._drafts((9,), 2, 2) == [0, 0]
