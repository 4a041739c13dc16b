"""What is made of the turns of a soak, planted one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.benchmarking.soak import SoakTurn, with_speeds
from outrider.benchmarking.soak_summary import summarize_soak
from tests.benchmarking.test_soak import ONE_TURN, soaked


def planted_turns(speed: Callable[[int], float], **changes: Any) -> list[SoakTurn]:
    """Turns as a run would have them, at given decode speeds by turn."""
    return [
        SoakTurn(
            session=1 + at // 5, turn=1 + at % 5, kind=f"kind {at % 5}", started_s=float(at), ttft_s=0.1,
            e2e_s=0.1 + 99 / speed(at), num_prompt_tokens=100, num_output_tokens=100, num_chunks=25,
            finish_reason="stop", error=None, is_empty=False, num_drafts=25, num_draft_tokens=175,
            num_accepted_tokens=75, num_generation_tokens=100, server_s=None, memory_bytes=1e9,
            tokens_per_s=speed(at), **changes,
        )
        for at in range(50)
    ]  # fmt: skip


def test_kinds_of_turns_are_no_phases_and_drift_fails_by_retention() -> None:
    assert summarize_soak(planted_turns(lambda at: 100.0 * (1 + at % 5)))["faults"] == []
    drifting = summarize_soak(planted_turns(lambda at: 100.0 * (1 + at % 5) * (1 - 0.004 * at)))
    assert drifting["faults"] == ["speed_retention"]
    assert drifting["speed_retention"] == pytest.approx((1 - 0.004 * 45) / (1 - 0.004 * 9), abs=0.01)


def test_what_cannot_be_judged_is_said() -> None:
    blind = [
        replace(turn, memory_bytes=None, num_drafts=None, num_draft_tokens=None, num_generation_tokens=150)
        for turn in planted_turns(lambda at: 100.0)
    ]
    text = " ".join(summarize_soak(blind)["warnings"])
    assert "memory was not judged" in text
    assert "nothing of its drafts" in text
    assert "other requests ran during 50 of 50 turns" in text
    idle = [replace(turn, num_draft_tokens=0) for turn in planted_turns(lambda at: 100.0)]
    assert "nothing was drafted" in " ".join(summarize_soak(idle)["warnings"])
    slower = [replace(turn, ttft_s=0.1 * (1 + 0.02 * at)) for at, turn in enumerate(planted_turns(lambda at: 100.0))]
    assert "time to first token grew" in " ".join(summarize_soak(slower)["warnings"])


def test_one_slow_turn_is_a_warning_and_two_are_a_fault() -> None:
    def found(slow: tuple[int, ...]) -> dict[str, Any]:
        return summarize_soak(planted_turns(lambda number: 50 if number in slow else 200))

    assert ("phases" in found((12,))["faults"], "phases" in found((12, 13))["faults"]) == (False, True)
    assert "single turns were slow: 13" in found((12,))["warnings"]


def test_memory_that_grows_is_a_fault_after_the_warm_up() -> None:
    used = iter(range(1000, 10_000, 20))
    found = summarize_soak(soaked({}, replace(ONE_TURN, num_sessions=14), memory=lambda: float(next(used))))
    assert {"memory_growth", "memory_step"} <= set(found["faults"])


def test_figures_of_nothing_are_left_out() -> None:
    """A server that exports 0 bytes, and an answer that took no time."""
    turns = [replace(turn, memory_bytes=0.0) for turn in planted_turns(lambda _: 100.0)]
    assert any("memory was not judged" in each for each in summarize_soak(turns)["warnings"])
    at_once = replace(turns[0], ttft_s=0.0, num_output_tokens=1, e2e_s=0.1)
    assert [turn.tokens_per_s for turn in with_speeds([at_once])] == [None]
