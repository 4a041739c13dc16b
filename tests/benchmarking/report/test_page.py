from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.benchmarking.report.build import build_report
from outrider.benchmarking.report.page import page
from outrider.benchmarking.report.records import read_record
from tests.benchmarking.report import made
from tests.benchmarking.report.html_check import Checked
from tests.browser import browse, needs_browser
from tests.serving import eventually

ALL = {
    "compare": made.compare(),
    "sweep": made.sweep(),
    "run": made.run(),
    "soak": made.soak(),
    "decode": made.decode(),
    "new": made.record("new-kind", {"figure": 1.5}),
}


def rendered(folder: Path, **records: dict[str, Any]) -> str:
    return page(build_report([read_record(path) for path in made.write(folder, **records)]))


def test_the_page_is_whole_and_every_address_is_on_it(tmp_path: Path) -> None:
    checked = Checked(rendered(tmp_path, **ALL))
    assert checked.faults == []
    assert checked.addresses == [f"#{name}" for name in ALL]
    assert checked.num_of["svg"] == 2 * checked.num_of["figure"] == 12
    assert "script" not in checked.num_of


def test_figures_warnings_and_environments_are_on_it(tmp_path: Path) -> None:
    text = Checked(rendered(tmp_path, **ALL)).text
    for words in ("1.61×", "95 % interval 1.54× to 1.69×", "Acceptance was imposed", "degraded", "91.7 %", "1.50"):
        assert words in text
    assert '"commit": "abc"' in text


def test_what_a_record_says_is_never_markup(tmp_path: Path) -> None:
    evil = "</style><script>alert(1)</script>&\"'"
    fields = made.compare() | {"name": evil, "command": evil, "workload": {"name": evil}, "notes": [evil]}
    fields["summary"] |= {"arm": evil, evil: evil}
    checked = Checked(rendered(tmp_path, evil=fields))
    assert checked.faults == []
    assert "script" not in checked.num_of
    assert evil in checked.text


def test_columns_of_numbers_are_set_flush_right(tmp_path: Path) -> None:
    html = rendered(tmp_path, run=made.run())
    assert "<tr><td>time to first token</td><td class=num>89.65</td>" in html


@needs_browser
def test_it_fits_a_telephone_and_a_desk_light_and_dark(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(rendered(tmp_path, **ALL), encoding="utf-8")
    paper = "getComputedStyle(document.body).backgroundColor"
    visible = "[...document.querySelectorAll('svg')].filter(e => e.checkVisibility()).length"
    widest = "Math.max(...[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().right))"
    with browse(path.as_uri(), tmp_path / "profile") as opened:
        eventually(lambda: opened.evaluate("document.readyState === 'complete' && document.images !== undefined"))
        papers = set()
        for width, scheme in ((390, "light"), (1280, "light"), (1280, "dark")):
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 390}
            opened.call("Emulation.setDeviceMetricsOverride", **metrics)
            opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            # What was asked of the browser takes effect in its own time.
            eventually(lambda width=width: opened.evaluate("document.documentElement.scrollWidth") <= width)
            eventually(lambda: opened.evaluate(visible) == 6)
            eventually(lambda width=width: opened.evaluate(widest) <= width)
            papers.add(opened.evaluate(paper))
    assert len(papers) == 2


@pytest.mark.parametrize("width", [(350, "narrow"), (760, "wide")])
def test_charts_are_drawn_for_both_widths(tmp_path: Path, width: tuple[int, str]) -> None:
    pixels, class_ = width
    assert f'<div class={class_}><svg viewBox="0 0 {pixels} ' in rendered(tmp_path, run=made.run())
