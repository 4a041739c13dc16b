"""Soaks of a scripted server over HTTP: every planted fault is found and named, and a clean run has none."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking.client import ServerClient, ServerKind
from outrider.benchmarking.counters import Counters, read_counters
from outrider.benchmarking.sessions import SHAPES, Shape, Turn
from outrider.benchmarking.soak import (
    SoakTurn,
    process_memory,
    run_soak,
    soak_workload,
)
from outrider.benchmarking.soak_summary import summarize_soak
from outrider.benchmarking.steadiness import Limits
from outrider.errors import ConfigError, EngineFault
from tests.serving import serve

TEXT = "All is well today.."  # 19 characters and an end: five blocks of four
STEP_S = 0.01
ONE_TURN = Shape("planted", 20, (Turn("same", "Say it.", 64),))


def script(text: str = TEXT, *, delay_s: float = STEP_S, first_s: float = 0.0, **options: Any) -> Script:
    made = Script.of_text(text, **options)
    steps = [replace(step, delay_s=delay_s) for step in made.steps]
    return replace(made, steps=(replace(steps[0], delay_s=delay_s + first_s), *steps[1:]))


NORMAL = script()
OFF = script(block_tokens=1, drafted=False)
COLLAPSED = replace(OFF, steps=tuple(replace(step, num_draft_tokens=3) for step in OFF.steps))
CYCLE = (6, 7, 8, 9, 16, 17, 18, 19)


class PlantedClock:
    """Time that passes where a script says so, whatever else this machine has to do."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        time.sleep(seconds / 5)  # until the client has read what there is


def soaked(scripts: Mapping[int, Script], shape: Shape = ONE_TURN, **options: Any) -> list[SoakTurn]:
    """A soak of a server that answers some sessions with scripts of their own."""
    planted = {f"Session s-{session}.": each for session, each in scripts.items()}
    clock = PlantedClock()
    with serve({**planted, "": NORMAL}, context_length=200_000, sleep=clock.sleep) as served:
        served.app.state.metrics.clock = clock
        client = ServerClient(served.url, clock=clock)
        turns = run_soak(client, shape, salt="s", **options)
        client.close()
        return turns


@pytest.mark.parametrize(
    ("planted", "cause"),
    [
        (OFF, "drafting off"),
        (COLLAPSED, "acceptance collapsed"),
        (script(delay_s=4 * STEP_S), "steps slow"),
        (script(first_s=0.3), "prefill"),
    ],
)
def test_a_planted_cycle_is_found_with_its_cause(planted: Script, cause: str) -> None:
    found = summarize_soak(soaked(dict.fromkeys(CYCLE, planted)))
    slow = [(phase["first"], phase["last"]) for phase in found["phases"] if phase["name"] == "degraded"]
    assert slow == [(6, 9), (16, 19)]
    assert {phase["cause"] for phase in found["phases"] if phase["name"] == "degraded"} == {cause}
    assert {phase["cause"] for phase in found["phases"] if phase["name"] in ("fast", "recovered")} == {None}
    assert (found["period"], found["is_cycle"], found["verdict"]) == (10, True, "fail")
    assert "phases" in found["faults"]


def test_a_clean_soak_of_growing_sessions_passes() -> None:
    shape = replace(SHAPES["continuous"], num_sessions=4).scaled(0.05)
    turns = soaked({}, shape, memory=lambda: 1e9)
    found = summarize_soak(turns)
    assert (found["faults"], found["warnings"], found["verdict"]) == ([], [], "pass")
    assert [phase["name"] for phase in found["phases"]] == ["steady"]
    assert found["mean_acceptance_length"] == pytest.approx(4.0)
    assert found["memory_growth"] == pytest.approx(0.0)
    assert found["speed_retention"] == pytest.approx(1.0)
    first, last = turns[0], turns[4]
    assert (last.session, last.turn, last.kind) == (1, 5, "last log")
    assert (last.num_prompt_tokens or 0) - (first.num_prompt_tokens or 0) > 5_000
    assert (first.num_output_tokens, first.num_drafts, first.num_draft_tokens) == (20, 5, 15)
    assert first.server_s is not None
    assert 0 < first.server_s <= first.e2e_s * 1.2


def test_empty_and_lost_answers_are_counted() -> None:
    found = summarize_soak(
        soaked({2: script(""), 5: replace(NORMAL, error="it broke")}, replace(ONE_TURN, num_sessions=8))
    )
    assert (found["num_empty"], found["num_errors"]) == (1, 1)
    assert {"num_empty", "num_errors"} <= set(found["faults"])
    assert found["rates"][1] is None or found["rates"][1] > 0
    assert found["rates"][4] is None


def test_memory_of_a_process_of_this_machine() -> None:
    assert process_memory(os.getpid())() > 1e7
    with pytest.raises(ConfigError, match="--server-pid"):
        process_memory(2**22 + 1)


def test_a_workload_is_named_by_its_shape() -> None:
    assert soak_workload(SHAPES["fresh"]).name == "soak-fresh"
    assert soak_workload(SHAPES["fresh"]).sha256 != soak_workload(SHAPES["fresh"].scaled(0.5)).sha256


def test_a_server_that_dies_leaves_what_was_seen_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(["outrider:generation_tokens_total 90\n", "outrider:generation_tokens_total 5\n"])

    def settled(client: ServerClient, kind: ServerKind) -> tuple[str, Counters]:
        text = next(texts, None)
        if text is None:
            raise EngineFault("it does not answer")
        return text, read_counters(text, kind)

    monkeypatch.setattr("outrider.benchmarking.soak.settled_metrics", settled)
    with serve({"": NORMAL}, context_length=200_000) as served, ServerClient(served.url) as client:
        turns = run_soak(client, replace(ONE_TURN, num_sessions=3), salt="s", memory=lambda: None)
    faults = [turn.counter_fault or "" for turn in turns]
    assert ["started anew" in faults[0], *(fault == "it does not answer" for fault in faults[1:])] == [True] * 3
    found = summarize_soak(turns)
    assert "counters" in found["faults"]
    assert any("counters were lost in 3 of 3" in each for each in found["warnings"])


def test_limits_that_nothing_breaks_are_refused() -> None:
    for wrong in ({"min_speed_retention": float("nan")}, {"max_memory_growth": -0.1}):
        with pytest.raises(ConfigError, match="is no limit"):
            Limits(**wrong)
    with pytest.raises(ConfigError, match="no such process"):
        process_memory(-1)
