"""T-007: a sampled request stays sampled with a drafter attached, and an unset temperature is the documented default.

Seen red: accept() judging requests without a seed as if they were greedy.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import SamplingParams
from tests.scripted import FixedProposer, TableTarget, make_test_engine, run_requests
from tests.statistics import assert_frequencies

PROBS = (0.4, 0.3, 0.2, 0.1)
NUM_DRAWS = 400
SAMPLED = SamplingParams(temperature=1.0)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SAMPLED, PROBS),
        (replace(SAMPLED, top_k=3), (4 / 9, 3 / 9, 2 / 9, 0.0)),
        (replace(SAMPLED, top_p=0.89), (4 / 9, 3 / 9, 2 / 9, 0.0)),
    ],
    ids=["temperature", "top_k", "top_p"],
)
def test_t007_all_that_should_occur_occurs(params: SamplingParams, expected: tuple[float, ...]) -> None:
    for proposer in (None, FixedProposer(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64))):
        engine = make_test_engine(TableTarget.constant(PROBS), proposer, context_length=NUM_DRAWS + 1)
        (token_ids,) = run_requests(engine, ([0], params))
        assert set(token_ids) == {token_id for token_id, prob in enumerate(expected) if prob > 0}
        assert_frequencies(token_ids, expected)


def test_t007_identical_requests_without_a_seed_are_not_all_equal() -> None:
    engine = make_test_engine(TableTarget.constant(PROBS), FixedProposer(torch.full((4,), 0.25)))
    texts = run_requests(engine, *([([0], replace(SAMPLED, max_tokens=8))] * 4))
    assert len({tuple(text) for text in texts}) > 1


def test_t007_an_unset_temperature_is_greedy_as_documented() -> None:
    for proposer in (None, FixedProposer(torch.full((4,), 0.25))):
        engine = make_test_engine(TableTarget.constant(PROBS), proposer)
        assert run_requests(engine, ([0], SamplingParams(max_tokens=9))) == [[0] * 9]
