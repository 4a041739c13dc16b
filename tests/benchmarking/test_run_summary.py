from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from outrider.benchmarking.counters import Counters
from outrider.benchmarking.request_sets import Item, RequestSet
from outrider.benchmarking.run_summary import run_record, spread, summarize
from tests.benchmarking.test_integrity import COUNTED, SAMPLES, run
from tests.benchmarking.test_runner import toy_sample

VLLM_KEYS = {
    "duration",
    "completed",
    "failed",
    "num_prompts",
    "max_concurrency",
    "request_rate",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "spec_decode_acceptance_rate",
    "spec_decode_acceptance_length",
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
    "spec_decode_per_position_acceptance_rates",
    *(
        f"{part}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for part in ("mean", "median", "std", "p50", "p90", "p99")
    ),
}
DRAFTED = replace(COUNTED, num_drafts=40, num_draft_tokens=160, num_accepted_tokens=80, accepted_per_position=(50, 30))


def test_figures_by_hand() -> None:
    found = summarize(run(counted=DRAFTED))
    assert found["duration_s"] == 20.0  # sent at 0 … 19, each took a second
    assert found["output_tokens_per_s"] == 220 / 20
    assert found["counted_tokens_per_s"] == 220 / 20
    assert found["requests_per_s"] == 1.0
    assert found["tpot_s"] == {"mean": 0.05, "p50": 0.05, "p90": 0.05, "p99": None, "max": 0.05}
    assert found["decode_tokens_per_s"]["p50"] == 20.0
    assert (found["mean_acceptance_length"], found["acceptance_rate"]) == (3.0, 0.5)
    assert found["acceptance_by_position"] == [1.25, 0.75]
    assert found["fire_rate_steps"] == 40 / (220 - 20 - 80)
    assert found["integrity"] == {"status": "ok", "findings": []}
    json.dumps(found)


def test_vllms_keys_are_in_vllms_units() -> None:
    found = summarize(run(counted=DRAFTED))
    assert found.keys() >= VLLM_KEYS
    assert found["mean_ttft_ms"] == 500.0
    assert found["std_e2el_ms"] == 0.0
    assert found["spec_decode_acceptance_rate"] == 50.0  # percent
    assert found["total_token_throughput"] == 420 / 20


def test_percentiles_and_what_is_unknown() -> None:
    assert spread([None, *map(float, range(1, 101))]) == {
        "mean": 50.5,
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
        "max": 100.0,
    }
    of_nine = spread([float(number) for number in range(9)])
    assert of_nine == {"mean": 4.0, "p50": 4.0, "p90": None, "p99": None, "max": 8.0}  # p90 would be the greatest
    assert spread([None]) is None
    found = summarize(run([toy_sample(num_output_tokens=None)], counted=None))
    assert (found["output_tokens_per_s"], found["tpot_s"], found["counted_tokens_per_s"]) == (None, None, None)
    assert found["mean_tpot_ms"] is None


def test_without_counters_the_answers_tell_of_acceptance() -> None:
    told = {"num_spec_steps": 4, "num_draft_tokens": 16, "num_accepted_draft_tokens": 8}
    samples = [replace(each, acceptance=told if at < 5 else None) for at, each in enumerate(SAMPLES)]
    found = summarize(run(samples, counted=None))
    assert (found["acceptance_source"], found["mean_acceptance_length"], found["acceptance_rate"]) == (
        "answers",
        3,
        0.5,
    )
    assert found["fire_rate_requests"] == 0.25
    assert summarize(run(samples, counted=Counters(num_generation_tokens=220)))["acceptance_source"] == "answers"


def test_a_failed_run_invalidates_itself_and_its_failures_are_in_no_figure() -> None:
    slow = toy_sample(0, 500.0, error="timeout")
    found = summarize(run([slow, *SAMPLES]))
    assert (found["num_failed"], found["e2e_latency_s"]["max"]) == (1, 1.0)
    assert found["integrity"]["status"] == "invalid"
    assert found["integrity"]["findings"][0]["name"] == "request_errors"


def test_a_record_has_raw_rows_and_no_text() -> None:
    items: Any = RequestSet("mine", (Item(prompt="secret"),))
    record = run_record(run(), items, name="r", summary={"a": 1}, url="http://server", model="m")
    assert record["workload"]["name"] == "mine"
    assert record["arms"][0]["settings"]["seed"] == 1
    assert record["arms"][0]["settings"]["url"] == "http://server"
    assert len(record["rows"]) == 20
    row = record["rows"][0]
    assert (row["e2e_s"], row["num_output_tokens"], row["num_characters"]) == (1.0, 11, 1)
    assert "text" not in row
    assert "secret" not in json.dumps(record)
