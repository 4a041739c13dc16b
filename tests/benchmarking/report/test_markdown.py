from __future__ import annotations

from pathlib import Path

from outrider.benchmarking.report.build import build_report
from outrider.benchmarking.report.markdown import markdown
from outrider.benchmarking.report.records import read_record
from tests.benchmarking.report import made


def test_charts_are_tables_and_every_part_is_there(tmp_path: Path) -> None:
    paths = made.write(tmp_path, a=made.compare(), b=made.soak(), c=made.decode())
    text = markdown(build_report([read_record(path) for path in paths], title="Ours"))
    assert text.startswith("# Ours\n")
    for line in (
        "- **speedup: 1.61×** (95 % interval 1.54× to 1.69×)",
        "| drafter over plain | 1.61× | 1.54× to 1.69× | 24 |",
        "| degraded | 7 | 10 | drafting off |",
        "| verify: products | 14.52 | 13.31 | 91.7 % |",
        "| a.json | Arms compared in pairs | speedup 1.61×; acceptance length 2.67 | NVIDIA H200 |",
        "> Acceptance was imposed: this times cycles, and its text is nobody's.",
        '    "dirty": false',
    ):
        assert line in text.replace("      ", "    ")


def test_a_tables_rows_have_as_many_cells_as_its_head(tmp_path: Path) -> None:
    fields = made.record("odd", {"text": "a | b\nc", "markup": "<b>"})
    (path,) = made.write(tmp_path, odd=fields)
    lines = markdown(build_report([read_record(path)])).splitlines()
    assert "| text | a \\| b c |" in lines
    assert "| markup | &lt;b> |" in lines
