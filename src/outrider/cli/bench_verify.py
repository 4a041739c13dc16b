"""`outrider bench verify`: a ladder of checks for a server that was just started."""

from __future__ import annotations

import secrets
from contextlib import closing, nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from outrider.benchmarking.record import make_record, write_record
from outrider.benchmarking.workloads import Workload
from outrider.cli import options
from outrider.cli.bench_options import ApiKey, Model, Record, Timeout, Url, server_key
from outrider.cli.output import emit_json, new_file, progress_bar, show
from outrider.errors import ConfigError

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
    from outrider.benchmarking.verify import climb

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
    with (
        closing(ServerClient(url, model=model, **settings)) as client,
        closing(ServerClient(plain_url, **settings)) if plain_url else nullcontext() as plain_client,
        progress_bar(len(RUNGS)) as report,
    ):
        rows = [asdict(rung) for rung in climb(client, config, plain_client=plain_client, progress=report)]
        arm = {"name": "server", "backend": "unknown", "target": None, "drafter": None, "settings": {"url": url}}
        if rows[0]["status"] == "pass":
            arm |= {"backend": client.server_kind(), "target": client.model}
    flips = [row.pop("flips") for row in rows][RUNGS.index("greedy")]
    failed = [row["name"] for row in rows if row["status"] == "fail"]
    summary = {"verdict": "fail" if failed else "pass", "failed": failed, "greedy": flips, "settings": asdict(config)}
    if record is not None:
        workload = Workload("verify", RUNGS)
        write_record(make_record("verify", workload=workload, arms=[arm], rows=rows, summary=summary), record)
    emit_json({**summary, "rungs": rows}) if as_json else _show(rows, url)
    if failed:
        raise typer.Exit(1)


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
