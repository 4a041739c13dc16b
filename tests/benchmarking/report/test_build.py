from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outrider.benchmarking.report.build import build_report, write_report
from outrider.benchmarking.report.records import read_record
from outrider.errors import ConfigError
from tests.benchmarking.report import made
from tests.benchmarking.report.html_check import Checked

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
RECORDS = sorted(BENCHMARKS.glob("*/*.json"))
PUBLISHED = {  # as their publishers write them
    "rtx3090x2-31b-draft-length": "5 6 7 8 15 109 99 95 91 82 141 161 168 167 172",
    "rtx3090x2-31b-methods": "1.56× 2.74× 95.16 167.55 5.23 142 109",
    "rtx3090x2-31b-soak": "100 98.6_% 55.78 pass",
    "rtxpro6000-31b-nvfp4-sampling": "1.047× 0.949× 1.066×",
    "rtxpro6000-31b-nvfp4-greedy": "1.007× 4.06× 171.70 42.30 1.5_%",
    "rtxpro6000-31b-nvfp4-quality": "150 24",
    "rtx5090m-26b-a4b-draft-length": (
        "220.61 223.90 215 212.25 202 207 201.39 194 187.33 "
        "225.95 235.22 222.07 217.66 206.80 213.27 211.27 195.76 196.12"
    ),
    "rtx5090m-26b-a4b-soak": "221 214 218 222 230 103 59 62 212 161 transition recovered",
}


def test_all_records_of_the_repository_make_one_report(tmp_path: Path) -> None:
    html, markdown = write_report(RECORDS, tmp_path / "out", title="All of them")
    text = html.read_text(encoding="utf-8")
    checked = Checked(text)
    assert checked.faults == []
    # Commands and servers are named with their addresses; nothing is fetched from any.
    assert not re.search(r"(?:src|href|action)\s*=\s*[\"']?(?:https?:|//)|url\(|@import|<script|<link|<img", text)
    assert {f"#{path.stem}" for path in RECORDS} <= set(checked.addresses)
    for path in RECORDS:
        assert path.name in markdown.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [path.stem for path in RECORDS if path.parent.name == "published"])
def test_published_figures_are_shown_as_they_were_published(tmp_path: Path, name: str) -> None:
    path = BENCHMARKS / "published" / f"{name}.json"
    record = read_record(path)
    assert record.is_published
    assert record.fields["source"]
    for written in write_report([path], tmp_path):
        text = written.read_text(encoding="utf-8")
        assert "Nothing here measured them" in text
        shown = set(re.findall(r"[\w.]+(?: %|×)?", re.sub(r"<[^>]*>", " ", text.replace("*", " "))))
        assert {figure.replace("_", " ") for figure in PUBLISHED[name].split()} <= shown


def test_measured_figures_are_those_of_the_record(tmp_path: Path) -> None:
    path = BENCHMARKS / "results" / "cpu-demo-greedy.json"
    summary = read_record(path).summaries[0]
    text = Checked(write_report([path], tmp_path)[0].read_text(encoding="utf-8")).text
    for value in (summary["speedup"], summary["mean_acceptance_length"], summary["plain_tokens_per_s"]):
        assert f"{value:.2f}" in text
    for share in summary["acceptance_by_position"]:
        assert f"{100 * share:.1f} %" in text
    assert "Published" not in text


@pytest.mark.parametrize(
    "summary",
    [
        {"acceptance_by_position": ["high", "low"]},
        {"rates": [1, "2"], "phases": []},
        {"rates": [1, 2], "phases": [{"name": "fast"}]},
        {"speedup": "fast"},
        {"speedup": 1.5, "speedup_interval": [1.4]},
    ],
)
def test_figures_of_another_shape_are_refused_by_name(tmp_path: Path, summary: dict[str, Any]) -> None:
    good, odd = made.write(tmp_path, good=made.run(), odd=made.record("bench-run", summary))
    with pytest.raises(ConfigError, match=r"odd\.json holds figures of another shape"):
        write_report([good, odd], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_older_report_is_overwritten(tmp_path: Path) -> None:
    (path,) = made.write(tmp_path, one=made.run())
    first = [each.read_text() for each in write_report([path], tmp_path / "out", title="first")]
    second = [each.read_text() for each in write_report([path], tmp_path / "out")]
    assert all("first" in text for text in first)
    assert not any("first" in text.split("acceptance")[0] for text in second)


def test_files_of_one_name_get_places_of_their_own(tmp_path: Path) -> None:
    records = []
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        records += [read_record(path) for path in made.write(tmp_path / folder, same=made.run())]
    assert [section.anchor for section in build_report(records).sections] == ["same", "same-2", "same-3"]
