from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.benchmarking.report.blocks import Chart
from outrider.benchmarking.report.drawings import NARROW_PX, WIDE_PX, charts
from outrider.benchmarking.report.records import Record
from tests.benchmarking.report import made


def of(fields: dict[str, Any]) -> list[Chart]:
    return list(charts(Record(Path("made.json"), fields)))


@pytest.mark.parametrize(
    ("fields", "titles"),
    [
        (made.compare(), ["Paired ratios of speed"]),
        (made.sweep(), ["Tokens a second over draft length n"]),
        (made.own_sweep(), ["Tokens a second over draft length n", "Draft lengths against the best"]),
        (made.run(), ["Acceptance by position"]),
        (made.soak(), ["Speed over the session"]),
        (made.decode(), ["Tokens a second over draft length n", "Where a cycle goes"]),
        (made.record("new-kind", {"figure": 1}), []),
    ],
    ids=["compare", "sweep", "own_sweep", "run", "soak", "decode", "unknown"],
)
def test_a_record_is_drawn_by_what_it_holds_for_both_widths(fields: dict[str, Any], titles: list[str]) -> None:
    drawn = of(fields)
    assert [chart.title for chart in drawn] == titles
    for chart in drawn:
        assert f'viewBox="0 0 {WIDE_PX} ' in chart.wide
        assert f'viewBox="0 0 {NARROW_PX} ' in chart.narrow
        assert all(len(row) == len(chart.table.columns) for row in chart.table.rows)


def test_captions_say_what_is_drawn() -> None:
    assert "noise floor, 2.1 %" in of(made.compare())[0].caption
    assert "1 + their sum is 5.22" in of(made.run())[0].caption
    without = made.compare()
    del without["summary"]["prompt_ratios"], without["summary"]["speedup_interval"], without["summary"]["noise_floor"]
    assert of(without)[0].caption == "The diamond is the ratio. No interval was recorded."


def test_tables_hold_what_is_drawn() -> None:
    sweep, against = of(made.own_sweep())
    assert sweep.table.rows == (("0", "50.00", "50.00"), ("3", "80.00", "45.00"), ("7", "100.00", "40.00"))
    assert against.table.rows[2] == ("prose, n 3 over n 0", "0.900×", "0.880× to 0.920×", "–")
    (cycle,) = of(made.decode())[1:]
    assert cycle.table.rows[2] == ("verify: products", "14.52", "13.31", "91.7 %")
    assert cycle.table.rows[-1] == ("verify: other", "0.410", "–", "–")


def test_a_hole_in_a_sweep_or_session_is_a_dash() -> None:
    cells = [
        {"workload": name, "num_speculative_tokens": n, "tokens_per_s": 10 + n}
        for name, n in (("a", 0), ("a", 4), ("b", 0), ("b", 2))
    ]
    assert of(made.record("sweep", cells))[0].table.rows == (("0", "10", "10"), ("2", "–", "12"), ("4", "14", "–"))
    soak = made.record("soak", {"rates": [1.0, None, 0.98], "phases": []})
    assert of(soak)[0].table.rows[1] == ("2", "–", "–")
