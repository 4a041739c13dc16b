from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.benchmarking.report.blocks import Section
from outrider.benchmarking.report.records import Record
from outrider.benchmarking.report.sections import section_of, where
from tests.benchmarking.report import made


def of(fields: dict[str, Any]) -> Section:
    return section_of(Record(Path("Some File.json"), fields))


def headlines(section: Section) -> list[tuple[str, str, str]]:
    return [(figure.label, figure.value, figure.note) for figure in section.figures]


def test_a_comparison_leads_with_its_speedup_and_interval() -> None:
    section = of(made.compare())
    assert headlines(section)[0] == ("speedup", "1.61×", "95 % interval 1.54× to 1.69×")
    assert section.findings == ("drafter over plain: faster by 61 %.",)
    assert section.warnings == ()
    assert [chart.title for chart in section.charts] == ["Paired ratios of speed"]
    assert "noise floor, 2.1 %" in section.charts[0].caption
    assert section.anchor == "some-file"


def test_a_run_that_was_stopped_leads_with_that() -> None:
    marks = {"complete": False, "stopped": "SIGTERM", "missing": [{"arm": "a", "num_rows": 3}, {"arm": "b"}]}
    fields = made.compare() | marks
    num_rows = len(fields["rows"])
    assert headlines(of(fields))[:2] == [
        ("run", "stopped", f"{num_rows} of {num_rows + 4} rows"),
        headlines(of(made.compare()))[0],
    ]
    soak = made.record("soak", {"verdict": "stopped", "mean_acceptance_length": 2.0}) | marks
    assert [label for label, _, _ in headlines(of(soak))] == ["run", "acceptance length"]
    assert headlines(of(made.record("sweep", []) | marks))[0][1] == "stopped"


def test_a_sweep_leads_with_the_best_of_every_line() -> None:
    figures = headlines(of(made.sweep()))
    assert figures[0][0] == "best tokens/s, concurrency 8"
    assert figures[0][2].startswith("at n = 6, 451.27 to ")
    (chart,) = of(made.sweep()).charts
    assert chart.table.columns == ("draft length n", *(f"concurrency {number}" for number in (1, 2, 4, 8)))
    assert chart.table.rows[3][1] == "90.00 (85.50 to 94.50)"


def test_a_run_shows_latencies_as_one_table() -> None:
    section = of(made.run())
    assert headlines(section)[0][:2] == ("output tokens/s", "263.70")
    title, table = section.tables[0]
    assert (title, table.columns) == ("Latency, ms", ("measure", "mean", "median", "p99"))
    assert table.rows[0] == ("time to first token", "89.65", "81.50", "163.00")
    assert not any("ttft" in row[0] for row in section.tables[1][1].rows)
    assert "1 + their sum is 5.22" in section.charts[0].caption


def test_spreads_in_seconds_are_latencies_in_ms() -> None:
    section = of(made.own_run())
    title, table = section.tables[0]
    assert (title, table.columns) == ("Latency, ms", ("measure", "mean", "p50", "p90", "p99"))
    assert table.rows[1] == ("time per output token", "13.50", "12.25", "20.00", "24.50")
    rest = dict(section.tables[1][1].rows)
    assert rest["integrity"] == "invalid"
    assert rest["spec decode acceptance rate"] == "60.00"
    assert rest["acceptance rate"] == "60 %"
    assert [label for label, _, _ in headlines(section)] == ["output tokens/s", "acceptance rate"]


def test_a_session_shows_its_phases() -> None:
    section = of(made.soak())
    assert [label for label, _, _ in headlines(section)] == ["speed retention", "slowest request", "fastest request"]
    title, table = section.tables[0]
    assert (title, table.columns) == ("Phases", ("name", "first", "last", "cause"))
    assert section.charts[0].table.rows[6][2] == "degraded"


def test_decoding_shows_cycles_and_says_that_acceptance_was_imposed() -> None:
    section = of(made.decode())
    assert "Acceptance was imposed" in section.warnings[0]
    assert [chart.title for chart in section.charts] == ["Tokens a second over draft length n", "Where a cycle goes"]
    assert section.charts[1].table.rows[2] == ("verify: products", "14.52", "13.31", "91.7 %")


def test_checks_are_a_table_of_their_own() -> None:
    rows = [
        {"name": "basic", "status": "pass", "reason": "ok"},
        {"name": "tools", "status": "skip", "reason": "told to"},
    ]
    section = of(made.record("verify", {"verdict": "pass"}, rows=rows))
    assert headlines(section) == [("verdict", "pass", "")]
    title, table = section.tables[0]
    assert (title, table.columns, table.rows[1]) == (
        "Checks",
        ("name", "status", "reason"),
        ("tools", "skip", "told to"),
    )


def test_an_unknown_kind_is_its_table() -> None:
    section = of(made.record("new-kind", [{"thing": "a", "num_cats": 3}, {"thing": "b"}]))
    assert (section.title, section.charts, section.figures) == ("new kind", (), ())
    title, table = section.tables[0]
    assert (title, table.columns, table.rows) == ("All figures", ("thing", "cats"), (("a", "3"), ("b", "–")))


def test_titles_tell_records_of_a_kind_apart() -> None:
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    assert of(made.record("demo", greedy)).title.endswith(": greedy")
    sampled = {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
    assert of(made.record("demo", sampled)).title.endswith(": temperature 1, top-k 64, top-p 0.95")
    assert of(made.record("demo", greedy, title="Own")).title == "Own"


def test_where_it_was_measured() -> None:
    gpu = {"name": "NVIDIA H200"}
    assert where({"accelerators": [gpu]}) == "NVIDIA H200"
    assert where({"accelerators": [gpu, gpu]}) == "2 × NVIDIA H200"
    assert where({"cpu_model": "AMD EPYC", "num_usable_cores": 2, "memory_bytes": 25276063744}) == (
        "AMD EPYC, 2 cores, 24 GiB"
    )
    assert where({"description": "a laptop"}) == "a laptop"
    assert where({}) == "not recorded"


def test_the_raw_environment_is_kept_whole() -> None:
    raw = json.loads(of(made.compare()).raw)
    assert raw["environment"] == made.MACHINE
    assert raw["command"] == "outrider bench-compare"
    assert [arm["name"] for arm in raw["arms"]] == ["plain", "drafter"]
