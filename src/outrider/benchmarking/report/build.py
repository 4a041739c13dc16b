"""`bench report`: records in, one Markdown and one HTML file out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from outrider.benchmarking.report.blocks import Report, Section
from outrider.benchmarking.report.markdown import markdown
from outrider.benchmarking.report.page import page
from outrider.benchmarking.report.records import Record, read_record
from outrider.benchmarking.report.sections import section_of
from outrider.errors import ConfigError

TITLE = "Measurements"
HTML_NAME, MARKDOWN_NAME = "report.html", "report.md"


def build_report(records: Sequence[Record], *, title: str = TITLE) -> Report:
    """A section a record, in the order given; ConfigError naming a file whose figures have an unusual shape."""
    sections: list[Section] = []
    for record in records:
        try:
            section = section_of(record)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(
                f"{record.path} holds figures of another shape than this version reads "
                f"({type(error).__name__}: {error}). Make the record again, or leave it out."
            ) from error
        used = {each.anchor for each in sections}
        anchor, count = section.anchor, 2
        while anchor in used:
            anchor, count = f"{section.anchor}-{count}", count + 1
        sections.append(replace(section, anchor=anchor))
    return Report(title, tuple(sections))


def write_report(paths: Sequence[Path], folder: Path, *, title: str = TITLE) -> list[Path]:
    """Read all records, then write both files into the folder, over older ones; returns their paths, HTML first."""
    report = build_report([read_record(path) for path in paths], title=title)
    folder.mkdir(parents=True, exist_ok=True)
    renderers: dict[str, Callable[[Report], str]] = {HTML_NAME: page, MARKDOWN_NAME: markdown}
    written = {
        folder / name: render(report) for name, render in renderers.items()
    }  # both are made before either is kept
    for path, contents in written.items():
        path.write_text(contents, encoding="utf-8")
    return list(written)
