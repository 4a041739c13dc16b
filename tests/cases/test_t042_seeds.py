"""T-042: a seeded request gives the same tokens alone, in any batch, in any order and after any number of others.

Draft lengths may not change them either: noise is keyed by seed and position alone, for drafter and target.
Seen red: noise_seed taken from the number of requests so far for seeded requests too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.proposer import DFlashProposer
from outrider.models.attention import allocate_caches
from outrider.models.gemma import GemmaTarget
from tests.scripted import make_test_engine, run_requests
from tests.toy import CPU, toy_drafter, toy_target

PROMPT = [5, 17, 80]
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=20, num_speculative_tokens=4)
OTHERS = [([i + 1, 90 - i], SamplingParams(temperature=float(i % 2), max_tokens=6 + i)) for i in range(5)]


@pytest.fixture(scope="module")
def target() -> GemmaTarget:
    return toy_target()


def make_engine(target: GemmaTarget) -> Engine:
    drafter = toy_drafter(target)
    caches = allocate_caches(
        drafter.config.layers, num_seats=6, context_length=128, max_rows=64, dtype=torch.float64, device=CPU
    )
    return make_test_engine(target, DFlashProposer(drafter, caches), max_seats=6)


def test_t042_same_seed_same_tokens_whatever_else_runs(target: GemmaTarget) -> None:
    request = (PROMPT, SEEDED)
    (alone,) = run_requests(make_engine(target), request)
    assert run_requests(make_engine(target), OTHERS[0], request)[1] == alone
    assert run_requests(make_engine(target), *OTHERS[:3], request, *OTHERS[3:])[3] == alone
    engine = make_engine(target)
    run_requests(engine, *([([1], SamplingParams(temperature=1.0, max_tokens=1))] * 50))
    assert run_requests(engine, request)[0] == alone


def test_t042_draft_lengths_do_not_change_the_tokens(target: GemmaTarget) -> None:
    lengths = (0, 2, 4)
    texts = run_requests(make_engine(target), *((PROMPT, replace(SEEDED, num_speculative_tokens=n)) for n in lengths))
    assert texts[0] == texts[1] == texts[2]


def test_t042_another_seed_gives_other_tokens(target: GemmaTarget) -> None:
    texts = run_requests(make_engine(target), (PROMPT, SEEDED), (PROMPT, replace(SEEDED, seed=8)))
    assert texts[0] != texts[1]
