from __future__ import annotations

import pytest

from outrider.backends.planted import Pace, Planted
from outrider.core import AcceptanceStats, SamplingParams
from outrider.metrics import acceptance_by_position

RATES = (0.9, 0.6, 0.3)


def stats_of(plan: Planted, params: SamplingParams, *, num_requests: int = 20) -> AcceptanceStats:
    stats = AcceptanceStats()
    for index in range(num_requests):
        for step in plan.script(index, params).steps:
            if step.num_draft_tokens:
                stats.record_cycle(
                    draft_length=step.num_draft_tokens, num_accepted_tokens=step.num_accepted_draft_tokens
                )
    return stats


@pytest.mark.parametrize("length", [1, 2, 3])
def test_rates_come_out_as_planted(length: int) -> None:
    plan = Planted(acceptance_by_position=RATES)
    stats = stats_of(plan, SamplingParams(max_tokens=120, num_speculative_tokens=length))
    found = acceptance_by_position(stats, num_speculative_tokens=length)
    assert found == pytest.approx(RATES[:length], abs=0.01)
    assert stats.num_draft_tokens == length * stats.num_cycles
    assert plan.acceptance_length(length) == pytest.approx(1 + sum(found), abs=0.02)


def test_no_drafts_where_none_are_wanted() -> None:
    assert stats_of(Planted(acceptance_by_position=RATES), SamplingParams(num_speculative_tokens=0)).num_cycles == 0
    assert stats_of(Planted(), SamplingParams()).num_cycles == 0


def test_seconds_follow_length_drift_and_cycle() -> None:
    plan = Planted(acceptance_by_position=RATES, step_s=0.01, draft_token_s=0.001, drift=0.1, cycle=(1.0, 2.0))
    assert plan.cycle_s(3) == pytest.approx(0.013)
    assert plan.tokens_per_s(0) == pytest.approx(100)
    delays = [plan.script(index, SamplingParams(max_tokens=9)).steps[1].delay_s for index in range(3)]
    assert delays == pytest.approx([0.013, 0.013 * 1.1 * 2, 0.013 * 1.2])
    assert plan.script(0, SamplingParams(max_tokens=9)).steps[0].delay_s == 0


def test_losses_come_in_turn() -> None:
    plan = Planted(lost_every=3)
    errors = [plan.script(index, SamplingParams(max_tokens=9)).error for index in range(6)]
    assert errors == [None, None, "planted loss"] * 2


def test_pace_makes_up_for_waking_late_but_not_for_time_off() -> None:
    now = [0.0]

    def late(seconds: float) -> None:
        now[0] += seconds + 0.003

    pace = Pace(clock=lambda: now[0], sleep=late)
    for _ in range(10):
        pace(0.01)
    assert now[0] == pytest.approx(0.103)  # and not 0.13
    now[0] += 1.0
    pace(0.01)
    assert now[0] == pytest.approx(1.116)
