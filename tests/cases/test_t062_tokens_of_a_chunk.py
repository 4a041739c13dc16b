"""T-062: tokens come from usage; speed is tokens after the first event over the time from first event to last.

Seen red: counting events, and taking the first event for one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.integrity import examine
from outrider.benchmarking.run_summary import summarize
from tests.benchmarking.test_answer import answer, piece, usage
from tests.benchmarking.test_integrity import run


def streamed(counts: Sequence[int]) -> Sample:
    """Events at 0.1 s, 0.2 s, … with so many tokens each; usage runs along."""
    totals = [sum(counts[: at + 1]) for at in range(len(counts))]
    events = [(0.1 * (at + 1), piece("x", total)) for at, total in enumerate(totals)]
    return answer(*events, (0.1 * len(counts), piece("", totals[-1], "stop")), (0.5, usage(totals[-1])))


@pytest.mark.parametrize(("counts", "speed"), [((1, 5, 3, 7), 50.0), ((4, 4, 4, 4), 40.0)])
def test_t062_speed_counts_tokens(counts: tuple[int, ...], speed: float) -> None:
    found = streamed(counts)
    assert found.tokens_per_s == pytest.approx(speed)
    assert found.chunk_gaps_s == pytest.approx((0.1, 0.1, 0.1))  # a figure of its own, not the time a token takes
    assert found.tpot_s == pytest.approx(0.3 / 15)


def test_t062_without_usage_it_says_so() -> None:
    found = answer((0.1, piece("ab")), (0.2, piece("cd", finish_reason="stop")))
    assert (found.tokens_per_s, found.tpot_s) == (None, None)
    judged = run([found], counted=None)
    assert "no_usage" in {each.name for each in examine(judged)}
    summary = summarize(judged)
    assert (summary["num_output_tokens"], summary["output_tokens_per_s"]) == (None, None)


def test_t062_one_event_has_no_speed() -> None:
    found = streamed([9])
    assert (found.num_output_tokens, found.tokens_per_s, found.tpot_s) == (9, None, None)
