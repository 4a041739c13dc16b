from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.benchmarking.report import readings
from outrider.benchmarking.report.curves import Span
from outrider.benchmarking.report.records import Record, read_record
from tests.benchmarking.report import made

ROOT = Path(__file__).resolve().parents[3]


def of(fields: dict[str, Any]) -> Record:
    return Record(Path("made.json"), fields)


def test_a_sweep_is_a_series_for_every_other_setting() -> None:
    record = of(made.sweep())
    assert readings.sweep_axis(record) == "num_speculative_tokens"
    found = readings.sweep_series(record)
    assert [each.name for each in found] == [f"concurrency {number}" for number in (1, 2, 4, 8)]
    assert [point.x for point in found[0].points] == [0, 2, 4, 6, 8, 12]
    assert found[0].points[0].interval == pytest.approx((0.95 * found[0].points[0].y, 1.05 * found[0].points[0].y))


def test_cells_are_put_in_order_and_holes_left_open() -> None:
    cells = [{"num_speculative_tokens": n, "tokens_per_s": 10.0 + n} for n in (8, 0, 4)]
    cells.append({"num_speculative_tokens": 2, "tokens_per_s": None})
    (series,) = readings.sweep_series(of(made.record("sweep", cells)))
    assert [point.x for point in series.points] == [0, 4, 8]


def test_a_table_over_nothing_is_no_sweep() -> None:
    cells = [{"workload": name, "tokens_per_s": 10.0} for name in ("code", "chat")]
    assert readings.sweep_series(of(made.record("sweep", cells))) == []
    assert readings.sweep_series(of(made.run())) == []


def test_a_peer_is_a_series_beside_ours() -> None:
    found = {each.name: each.best.y for each in readings.sweep_series(of(made.decode()))}
    assert found == {"ours": 281.3, "peer": 263.7}


def test_the_drafter_loses_where_drafting_nothing_is_best() -> None:
    assert readings.losing_cells(of(made.sweep())) == []
    assert len(readings.losing_cells(of(made.sweep(best=0)))) == 4


def test_a_comparison_brings_its_interval_pairs_and_noise_floor() -> None:
    record = of(made.compare())
    (effect,) = readings.effects(record)
    assert (effect.name, effect.ratio) == ("drafter over plain", 1.61)
    assert effect.interval == pytest.approx((1.54, 1.69))
    assert len(effect.pairs) == 24
    assert readings.noise_floor(record) == 0.021


def test_comparisons_are_told_apart_by_what_differs() -> None:
    cells = [
        {"workload": "code", "arm": "b", "baseline": base, "speedup": 1.1, "temperature": 1} for base in ("plain", "a")
    ]
    names = [effect.name for effect in readings.effects(of(made.record("compare", cells)))]
    assert names == ["b over plain", "b over a"]


def test_pairs_of_the_demo_are_seconds_a_token() -> None:
    record = read_record(ROOT / "benchmarks" / "results" / "cpu-demo-greedy.json")
    (effect,) = readings.effects(record)
    assert effect.name == "speculative over plain"
    assert len(effect.pairs) == record.summaries[0]["prompts"] == 24
    assert min(effect.pairs) < effect.ratio < max(effect.pairs)
    rows = [
        {"arm": "plain", "prompt_index": 0, "decode_s": 3.0, "token_ids": [1, 2, 3]},
        {"arm": "speculative", "prompt_index": 0, "decode_s": 2.0, "token_ids": [1, 2, 3, 4, 5]},
        {"arm": "speculative", "prompt_index": 1, "decode_s": 2.0, "token_ids": [1, 2]},
    ]
    assert readings.paired_ratios(of(made.record("demo", {}, rows=rows)), {}) == (3.0,)


def test_sessions_acceptance_and_parts() -> None:
    (session,) = readings.sessions(of(made.soak(num_turns=2)))
    assert (session.name, len(session.rates), session.spans[1]) == ("", 20, Span("degraded", 7, 10))
    assert session.unit == "tokens/s"
    ((name, shares),) = readings.acceptance_by_position(of(made.run()))
    assert (name, shares[0], len(shares)) == ("", 0.89, 7)
    ((name, parts),) = readings.cycle_parts(of(made.decode()))
    assert [part.name for part in parts][2:4] == ["verify: products", "verify: head"]
    assert parts[-1].floor_ms is None


def test_a_session_may_lack_speeds_and_measure_against_its_fast_level() -> None:
    phases = [{"name": "fast", "first": 1, "last": 3, "relative_speed": 1.0}]
    (session,) = readings.sessions(of(made.record("soak", {"rates": [1.0, None, 0.98], "phases": phases})))
    assert (session.rates, session.unit) == ((1.0, None, 0.98), "speed, fast = 1")
    assert readings.sessions(of(made.record("soak", {"rates": [None, None]}))) == []


def test_draft_lengths_are_shares_of_the_best_of_their_condition() -> None:
    record = of(made.own_sweep())
    found = {effect.name: (effect.ratio, effect.interval) for effect in readings.against_best(record)}
    assert list(found) == ["code, n 0 over n 7", "code, n 3 over n 7", "prose, n 3 over n 0", "prose, n 7 over n 0"]
    ratio, interval = found["prose, n 3 over n 0"]
    assert ratio == 0.9
    assert interval == pytest.approx((0.88, 0.92))
    assert [series.name for series in readings.sweep_series(record)] == ["code", "prose"]
    assert readings.losing_cells(record) == ["prose"]
    assert [series.best.is_best for series in readings.sweep_series(record)] == [True, True]


def test_other_records_have_none_of_it() -> None:
    record = of(made.record("new-kind", {"figure": 1}))
    assert readings.effects(record) == readings.sessions(record) == readings.cycle_parts(record) == []
    assert readings.noise_floor(record) is None


def test_tables_leave_raw_series_and_nested_ones_out() -> None:
    summary = made.soak()["summary"]
    assert readings.scalar_columns([summary]) == ["period", "speed_retention"]
    assert [key for key, _ in readings.nested_tables(summary)] == ["phases"]
    assert readings.scalar_columns([{"prompt_ratios": [1.1, 1.2], "speedup": 1.15}]) == ["speedup"]
    assert readings.scalar_columns([{"a": 1, "long": list(range(17))}, {"b": 2}]) == ["a", "b"]


def test_a_record_that_compared_says_itself_whether_drafting_nothing_wins() -> None:
    cell = {"workload": "code", "output_tokens_per_s": 90}
    cells = [{**cell, "num_speculative_tokens": n, "is_best": n == 0} for n in (0, 3)]
    told = [[{**cell, "drafter_loses": loses} for cell in cells] for loses in (False, True)]
    assert [readings.losing_cells(of(made.record("sweep", each))) for each in told] == [[], ["made"]]


def test_drafters_are_drawn_as_multiples_of_the_baselines_acceptance() -> None:
    cell = {"drafter": "new", "domain": "code", "temperature": 0.0, "baseline": "old"}
    summary = [
        {**cell, "drafter": "old", "mean_acceptance_length": 2.0, "difference": None, "interval": None},
        {**cell, "mean_acceptance_length": 2.5, "difference": 0.5, "interval": [0.2, 0.8]},
        {**cell, "domain": "prose", "mean_acceptance_length": 3.0, "difference": 0.0, "interval": None},
        {**cell, "domain": "none", "mean_acceptance_length": None, "difference": None, "interval": None},
    ]
    first, second = readings.against_baseline(of(made.record("train-select", summary)))
    assert (first.name, first.ratio) == ("code", 1.25)
    assert first.interval == (1.1, 1.4)
    assert (second.name, second.ratio, second.interval) == ("prose", 1.0, None)
