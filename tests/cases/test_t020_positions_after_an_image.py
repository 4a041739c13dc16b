"""T-020: after given rows blocks start at the last token's position plus one, and the drafter's context is their own.

The project's rule is one-dimensional: a row's position is its place, so that the second map of the case is the only one
and the first, a grid after which text goes on at 7, is refused.
Seen red: cut() from the first row in every chunk; blocks that start at the number of tokens that are text; given rows
left out of the drafter's context; the grid accepted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.state import RequestState
from outrider.errors import RequestError
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import GivenRows
from outrider.models.draft_layers import BlockRows
from outrider.models.multimodal import PromptRows
from tests.cases.common import fresh_caches, snapshot, text_rows, toy_proposer
from tests.cases.mixed import finish_rows, mixed_prompt
from tests.scripted import make_test_engine
from tests.toy import MASK_TOKEN_ID, TAP_LAYERS, block_logits, reference_greedy, toy_drafter, toy_target

PROMPT = mixed_prompt([5, 17, 80, 3], 6, [44, 9, 61])
NUM_ROWS, NUM_TOKENS, CONTEXT_LENGTH = 13, 16, 48  # no ring wraps: slot p of every cache is position p
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)


class WatchedKernels(TorchKernels):
    """Notes the slots each cache is written in, by the address of its keys."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.written: dict[int, list[int]] = {}

    def write_cache(self, cache: LayerCache, keys: Tensor, values: Tensor, seats: Tensor, positions: Tensor) -> None:
        slots = (positions[seats >= 0] % cache.num_slots).tolist()
        self.written.setdefault(cache.keys.data_ptr(), []).extend(slots)
        super().write_cache(cache, keys, values, seats, positions)


@pytest.mark.parametrize("prefill_rows", [5, 64])  # the image in two chunks, and in one
def test_t020_the_drafter_stands_where_the_text_does(prefill_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = WatchedKernels()
    target = toy_target(kernels=kernels)
    drafter = toy_drafter(target)
    proposer = toy_proposer(drafter, context_length=CONTEXT_LENGTH)
    starts, best = [], drafter.best

    def watched(block: BlockRows, caches: object) -> Tensor:
        starts.append(int(block.starts[0]))
        assert block.positions.tolist() == list(range(starts[-1], starts[-1] + block.block_rows))
        return best(block, caches)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter, "best", watched)
    anchors = []

    def check(request: RequestState) -> None:
        anchor = NUM_ROWS + len(request.output_token_ids) - 1
        anchors.append(anchor)
        text = [*PROMPT.token_ids.tolist(), *request.output_token_ids]
        rebuilt = fresh_caches(drafter.config.layers, context_length=CONTEXT_LENGTH)
        rows = replace(text_rows(text[:-1]), given=PROMPT.given.cut(0, anchor))
        output = target.forward(rows, fresh_caches(target.config.layers), tap_layers=TAP_LAYERS)
        assert output.taps is not None
        drafter.write_context(output.taps, rows.seats, rows.positions, rebuilt)
        block = BlockRows(torch.tensor([text[-1], *[MASK_TOKEN_ID] * 4]), torch.tensor([0]), torch.tensor([anchor]), 5)
        found, wanted = (block_logits(drafter, block, caches) for caches in (proposer.caches, rebuilt))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)

    settings = {"max_seats": 1, "context_length": CONTEXT_LENGTH, "prefill_rows": prefill_rows}
    engine = make_test_engine(target, proposer, **settings)
    request = finish_rows(engine, PROMPT, GREEDY, after_step=check)
    expected = reference_greedy(target, PROMPT.token_ids.tolist(), NUM_TOKENS, PROMPT.given)
    assert request.output_token_ids == expected
    assert expected != reference_greedy(target, PROMPT.token_ids.tolist(), NUM_TOKENS)  # the given rows are read
    assert starts[0] == NUM_ROWS
    assert starts == anchors[: len(starts)]
    for cache in proposer.caches:
        slots = kernels.written[cache.keys.data_ptr()]
        assert slots[: anchors[-1]] == list(range(anchors[-1]))
    for cache in engine.caches:
        assert kernels.written[cache.keys.data_ptr()][:NUM_ROWS] == list(range(NUM_ROWS))


def test_t020_the_map_of_a_grid_is_refused() -> None:
    grid = torch.tensor([0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9])
    with pytest.raises(RequestError, match="row 5 of the prompt has position 4"):
        PromptRows(PROMPT.token_ids, grid, PROMPT.given)


@pytest.mark.parametrize("rows_per_pass", [None, 16])
def test_t020_text_is_what_it_was_bit_for_bit(rows_per_pass: int | None) -> None:
    """The same text as ids and as rows of which none is given."""
    target = toy_target()
    token_ids = [5, 17, 80, 3, 44, 9, 61, 2, 33]
    nobody = GivenRows(torch.zeros(9, dtype=torch.bool), torch.full((9, 32), torch.nan, dtype=torch.float64))
    found = []
    for is_rows in (False, True):
        proposer = toy_proposer(toy_drafter(target))
        engine = make_test_engine(target, proposer, max_seats=1, rows_per_pass=rows_per_pass)
        if is_rows:
            request = finish_rows(engine, PromptRows(torch.tensor(token_ids), torch.arange(9), nobody), GREEDY)
        else:
            request = engine.add(token_ids, GREEDY)
            while engine.has_work:
                engine.step()
        found.append((request.output_token_ids, [*snapshot(engine.caches), *snapshot(proposer.caches)]))
    (plain_ids, plain), (given_ids, given) = found
    assert plain_ids == given_ids
    assert all(torch.equal(*pair) for pair in zip(plain, given, strict=True))
