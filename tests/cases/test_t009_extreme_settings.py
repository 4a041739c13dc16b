"""T-009: extreme but legal settings give what plain decoding gives, and illegal ones are refused by name.

Seen red: greedy only at temperature 0 exactly, so that logits overflow; repetition_penalty 0 let in; min_p left out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.adjustments import make_adjustments
from outrider.engine.sampling import filtered_probs
from outrider.errors import RequestError
from tests.scripted import FixedProposer, TableTarget, make_test_engine, run_requests
from tests.statistics import assert_frequencies
from tests.toy import CPU

LOGITS = torch.tensor([2.0, 1.5, 1.2, 1.0, 0.7, 0.0, -1.0, -3.0], dtype=torch.float64)
DRAFTED = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
NUM_DRAWS = 1500
CERTAIN: list[dict[str, Any]] = [
    {"temperature": 1e-6},
    {"temperature": 1e-320},  # logits divided by it are infinite
    {"temperature": 1e-4},
    {"temperature": 0.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 1.0},
]
SPREAD: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": 8},
    {"top_k": 1000},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"min_p": 0.2},
    {"temperature": 2.0, "min_p": 0.2, "top_p": 0.9},
    {"allowed_token_ids": (6, 7), "top_k": 5},
    {"allowed_token_ids": (1,)},
    {"logit_bias": {7: 100.0, 0: -100.0}},
]


def draw_many(fields: dict[str, Any], *, num_draws: int) -> list[int]:
    """Tokens of one long drafted answer: every token is drawn from the same distribution."""
    proposer = FixedProposer(DRAFTED, max_draft_length=3)
    engine = make_test_engine(TableTarget(LOGITS.expand(8, -1)), proposer, context_length=num_draws + 1)
    return run_requests(engine, ([0], SamplingParams(**fields)))[0]


@pytest.mark.parametrize("fields", CERTAIN, ids=str)
def test_t009_settings_that_leave_one_token_are_greedy(fields: dict[str, Any]) -> None:
    assert draw_many(fields, num_draws=40) == [0] * 40


@pytest.mark.parametrize("fields", SPREAD, ids=str)
def test_t009_others_follow_the_plain_distribution(fields: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **fields})
    adjustments = make_adjustments(params, [0], end_token_ids=(), vocab_size=8, tokenizer=None, device=CPU)
    probs = filtered_probs(LOGITS if adjustments is None else adjustments.apply(LOGITS, []), params)
    assert probs.isfinite().all()
    assert_frequencies(draw_many({"temperature": 1.0, **fields}, num_draws=NUM_DRAWS), probs.tolist())


@pytest.mark.parametrize("penalty", [0.01, 1.3, 100.0])
@pytest.mark.parametrize("temperature", [0.0, 2e-5, 1.0])
def test_t009_repetition_penalties_equal_plain_decoding(penalty: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, repetition_penalty=penalty, max_tokens=30)
    target = TableTarget(LOGITS.expand(8, -1))
    (plain,) = run_requests(make_test_engine(target), ([0], params))
    assert run_requests(make_test_engine(target, FixedProposer(DRAFTED)), ([0], params)) == [plain]


@pytest.mark.parametrize("penalty", [0, -1.0, float("inf")])
def test_t009_a_repetition_penalty_that_divides_by_nothing_is_refused(penalty: float) -> None:
    with pytest.raises(RequestError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=penalty)
