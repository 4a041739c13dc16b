"""`outrider bench report`: a page for people, from records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.benchmarking.report.build import TITLE, write_report
from outrider.benchmarking.report.records import find_records
from outrider.cli import options
from outrider.cli.output import emit_json, show, writable


def report(
    records: Annotated[list[Path], typer.Argument(help="Records, or folders of them.", metavar="FILE")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.md; older ones are overwritten.")],
    title: Annotated[str, typer.Option(help="What stands at the top.")] = TITLE,
    as_json: options.Json = False,
) -> None:
    """Turn records into one HTML file that needs no network, and the same in Markdown."""
    files = find_records(records)
    written = write_report(files, writable("--out", out, is_directory=True), title=title)
    if as_json:
        emit_json({"records": [str(path) for path in files], "html": str(written[0]), "markdown": str(written[1])})
    else:
        show(f"{len(files)} record{'' if len(files) == 1 else 's'}: {written[0]} and {written[1]}")
