from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.benchmarking.counters import Counters
from outrider.benchmarking.integrity import Limits, cached_share, examine
from outrider.benchmarking.runner import Load, Run
from tests.benchmarking.test_runner import toy_sample

SAMPLES = tuple(toy_sample(number, 1.0, num_cached_tokens=0) for number in range(20))
COUNTED = Counters(
    num_drafts=10,
    num_prompt_tokens=200,
    num_generation_tokens=220,
    num_cached_prompt_tokens=0,
    num_requests_finished=20,
)


def run(samples: Any = SAMPLES, *, counted: Counters | None = COUNTED, load: Load | None = None, **changes: Any) -> Run:
    facts: dict[str, Any] = {
        "seed": 1,
        "server": "outrider",
        "counter_fault": None,
        "was_busy": False,
        "client_lag_s": 0.001,
        "arrival_lag_s": None,
    }
    return Run(load=load or Load(max_tokens=11), samples=tuple(samples), counted=counted, **{**facts, **changes})


def names(found: Run) -> set[str]:
    return {each.name for each in examine(found)}


def changed(*places: int, **changes: Any) -> list[Any]:
    return [replace(each, **changes) if at in places else each for at, each in enumerate(SAMPLES)]


def test_a_sound_run_has_no_findings() -> None:
    assert examine(run()) == ()


def test_answers() -> None:
    assert names(run(changed(3, error="HTTP 500: no", num_output_tokens=None))) == {"request_errors"}
    assert names(run(changed(3, num_output_tokens=None))) == {"no_usage"}
    assert names(run(changed(*range(20), num_output_tokens=None))) == {"no_usage"}  # and no other tenant is accused
    assert names(run(changed(3, num_output_tokens=0))) == {"empty_answers"}
    assert "no_tokens" in names(run(changed(*range(20), num_output_tokens=0)))
    assert "no_tokens" in names(run(changed(*range(20), num_output_tokens=None, error="x")))


def test_loops_and_buffers() -> None:
    assert names(run(changed(*range(11), text="and " * 200))) == {"looping_answers"}
    assert names(run(changed(*range(10), text="and " * 200))) == set()
    at_once = {"ttft_s": 0.9995, "num_chunks": 9, "chunk_gaps_s": (0.00005,) * 8}
    assert names(run(changed(2, **at_once))) == {"buffered"}
    assert changed(2, **at_once)[2].tpot_s is None
    assert names(run(changed(2, **{**at_once, "ttft_s": 0.96}))) == set()  # 4 ms a token after a long prompt


@pytest.mark.parametrize(
    ("changes", "name", "is_fatal"),
    [
        ({"counted": replace(COUNTED, num_requests_finished=21)}, "other_tenant", True),
        ({"counted": replace(COUNTED, num_generation_tokens=241)}, "other_tenant", True),
        ({"was_busy": True}, "other_tenant", True),
        ({"counted": replace(COUNTED, num_generation_tokens=199)}, "fewer_counted", False),
        ({"counted": replace(COUNTED, num_generation_tokens=105)}, "fewer_counted", True),
        ({"counted": replace(COUNTED, num_drafts=0)}, "not_drafted", False),
        ({"counted": None}, "no_counters", False),
        ({"counted": None, "counter_fault": "it fell"}, "counter_reset", True),
        ({"client_lag_s": 0.03}, "client_bound", True),
        ({"arrival_lag_s": 0.2}, "client_bound", True),
    ],
)
def test_counters_and_client(changes: dict[str, Any], name: str, is_fatal: bool) -> None:
    assert [(each.name, each.is_fatal) for each in examine(run(**changes))] == [(name, is_fatal)]


def test_counts_may_differ_by_a_stop_token_each() -> None:
    assert examine(run(counted=replace(COUNTED, num_generation_tokens=240))) == ()
    assert examine(run(counted=replace(COUNTED, num_generation_tokens=200))) == ()


def test_tokens_of_a_lost_answer_are_ours() -> None:
    lost = changed(3, error="lost", num_output_tokens=None)
    assert names(run(lost, counted=replace(COUNTED, num_generation_tokens=235))) == {"request_errors"}
    assert "other_tenant" in names(run(lost, counted=replace(COUNTED, num_generation_tokens=241)))


def test_cached_prompts() -> None:
    warm = changed(*range(10), num_cached_tokens=8)
    assert cached_share(run(warm)) == pytest.approx(0.4)
    assert names(run(warm)) == {"cache_hits"}
    assert names(run(warm, load=Load(expected_cached_share=0.4))) == set()
    assert names(run(warm, load=Load(expected_cached_share=0.8))) == {"cache_bypass"}
    assert names(run(changed(1, num_cached_tokens=8))) == set()  # 4 %: a template's beginning
    silent = changed(*range(20), num_cached_tokens=None)
    assert names(run(silent, counted=replace(COUNTED, num_cached_prompt_tokens=100))) == {"cache_hits"}
    assert cached_share(run(silent, counted=None)) is None


def test_limits_are_settings() -> None:
    assert examine(run(client_lag_s=0.03), Limits(max_client_lag_s=0.05)) == ()
