"""`outrider bench verify`: a ladder of checks for a server that was just started."""

from __future__ import annotations

import secrets
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from outrider.benchmarking.record import RecordFile, make_record
from outrider.benchmarking.workloads import Workload
from outrider.cli import options
from outrider.cli.bench_options import ApiKey, Model, Record, Timeout, Url, server_key
from outrider.cli.output import Found, emit_json, new_file, progress_bar, show, stoppable
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.benchmarking.client import ServerClient
    from outrider.benchmarking.rungs import LadderConfig
    from outrider.benchmarking.verify import Rung

_STYLES = {"pass": "green", "fail": "bold red", "skip": "dim"}


def verify(
    url: Url,
    essay_tokens: Annotated[int, typer.Option(help="Most tokens of the text whose quality is judged.")] = 2000,
    min_acceptance_length: Annotated[
        float, typer.Option(help="Tokens a cycle must be worth on that text; 0 for a server without a drafter.")
    ] = 2.0,
    needle_tokens: Annotated[
        str, typer.Option(help="Prompt lengths to look for a needle in; cut to the server's context.")
    ] = "10000,30000",
    greedy_tokens: Annotated[int, typer.Option(help="Of each text written with and without drafting.")] = 128,
    tie_tolerance: Annotated[
        float | None,
        typer.Option(help="Gap of two log-probabilities that is a rounding tie; measured if left out, 0 allows none."),
    ] = None,
    plain_url: Annotated[
        str | None, typer.Option(help="The same target without drafter, where a server cannot leave drafting out.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="A rung to leave out; may be given several times.")] = None,
    model: Model = None,
    api_key: ApiKey = None,
    timeout_s: Timeout = 600.0,
    record: Record = None,
    as_json: options.Json = False,
) -> None:
    """Check a server from "it answers" to "it finds a needle in a long prompt"; exit code 1 if a rung failed."""
    from outrider.benchmarking.client import ServerClient
    from outrider.benchmarking.rungs import RUNGS, LadderConfig
    from outrider.benchmarking.verify import Rung, climb

    config = LadderConfig(
        essay_tokens=essay_tokens,
        min_acceptance_length=min_acceptance_length,
        greedy_tokens=greedy_tokens,
        tie_tolerance=tie_tolerance,
        needle_tokens=_sizes(needle_tokens),
        skipped=tuple(skip or ()),
        salt=secrets.token_hex(4),
    )
    new_file("--record", record)
    settings: dict[str, Any] = {"api_key": api_key or server_key(), "timeout_s": timeout_s}
    file, kept = RecordFile(record), list[Rung]()

    def made() -> dict[str, Any]:
        return _record(kept, config, url=url, client=client)

    def so_far() -> Found | None:
        return (made(), [{"arm": "server", "rung": name} for name in RUNGS[len(kept) :]]) if kept else None

    with (
        ServerClient(url, model=model, **settings) as client,
        ServerClient(plain_url, **settings) if plain_url else nullcontext() as plain_client,
        progress_bar(len(RUNGS)) as report,
    ):
        with stoppable(file, so_far):
            climb(client, config, plain_client=plain_client, progress=report, keep=kept.append)
        written = made()
    file.write(written)
    rows, summary = written["rows"], written["summary"]
    failed = summary["failed"]
    emit_json({**summary, "rungs": rows}) if as_json else _show(rows, url)
    if failed:
        raise typer.Exit(1)


def _record(rungs: list[Rung], config: LadderConfig, *, url: str, client: ServerClient) -> dict[str, Any]:
    """Of the rungs that were tried; the first says whether the server can be asked what it is."""
    from outrider.benchmarking.rungs import RUNGS

    rows = [asdict(rung) for rung in rungs]
    arm = {"name": "server", "backend": "unknown", "target": None, "drafter": None, "settings": {"url": url}}
    if rows[0]["status"] == "pass":
        arm |= {"backend": client.server_kind(), "target": client.model}
    flips = [found for row in rows if (found := row.pop("flips"))]
    failed = [row["name"] for row in rows if row["status"] == "fail"]
    said = {"verdict": "fail" if failed else "pass", "failed": failed, "greedy": flips[0] if flips else None}
    summary = {**said, "settings": asdict(config)}
    return make_record("verify", workload=Workload("verify", RUNGS), arms=[arm], rows=rows, summary=summary)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise ConfigError(f"--needle-tokens {text!r} is no list of whole numbers, such as 10000,30000.") from None


def _show(rows: list[dict[str, Any]], url: str) -> None:
    table = Table(title=f"{url}, rung by rung")
    for column in ("rung", "", "s", "what was found, and what to do"):
        table.add_column(column, justify="right" if column == "s" else "left")
    for row in rows:
        mark = f"[{_STYLES[row['status']]}]{row['status']}"
        said = escape(row["reason"]) + (f"\n[yellow]→ {escape(row['advice'])}" if row["advice"] else "")
        table.add_row(row["name"], mark, f"{row['seconds']:.1f}" if row["seconds"] else "", said)
    show(table)
