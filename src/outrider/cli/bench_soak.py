"""`outrider bench soak`: agent sessions against a server for a long time, and whether it stays what it was."""

from __future__ import annotations

import secrets
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.benchmarking.record import RecordFile, make_record
from outrider.benchmarking.steadiness import Limits
from outrider.cli import options
from outrider.cli.bench_options import ApiKey, Model, Record, Timeout, Url, server_key
from outrider.cli.output import Found, emit_json, new_file, progress_bar, progress_line, show, stoppable
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.benchmarking.sessions import Shape

ShapeName = Annotated[
    str, typer.Option("--shape", help="fresh, continuous or quick: how many sessions, how they grow.")
]


def soak(
    url: Url,
    shape: ShapeName = "fresh",
    sessions: Annotated[int | None, typer.Option(help="How many; the shape's own number if left out.")] = None,
    turns: Annotated[
        int | None, typer.Option(help="Of each session, the first so many; 1 repeats one request.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Size of tool results, as a multiple of the shape's.")] = 1.0,
    no_tools: Annotated[bool, typer.Option("--no-tools", help="Put tool results into the user's messages.")] = False,
    server_pid: Annotated[
        int | None, typer.Option(help="Watch this process's memory, if the server runs here.")
    ] = None,
    min_retention: Annotated[
        float, typer.Option(help="Speed of the last fifth over that of the first, at least.")
    ] = Limits.min_speed_retention,
    max_growth: Annotated[float, typer.Option(help="Of memory over the run, as a share.")] = Limits.max_memory_growth,
    model: Model = None,
    api_key: ApiKey = None,
    timeout_s: Timeout = 600.0,
    record: Record = None,
    as_json: options.Json = False,
) -> None:
    """Soak a server with agent sessions; exit code 1 if it slowed down, grew, failed, went mute or had slow phases."""
    from outrider.benchmarking.client import ServerClient
    from outrider.benchmarking.sessions import find_shape
    from outrider.benchmarking.soak import SoakTurn, process_memory, run_soak, soak_workload, with_speeds
    from outrider.benchmarking.soak_summary import summarize_soak

    planned = _planned(find_shape(shape).scaled(scale), sessions, turns)
    limits = Limits(min_speed_retention=min_retention, max_memory_growth=max_growth)
    new_file("--record", record)
    memory = process_memory(server_pid) if server_pid is not None else None
    salt = secrets.token_hex(4)  # two soaks of one server must not find each other's prefixes
    num_turns = planned.num_sessions * len(planned.turns)
    file, kept = RecordFile(record), list[SoakTurn]()

    def made(turns: list[SoakTurn]) -> dict[str, Any]:
        settings = {"url": url, "salt": salt, "scale": scale, "tools": not no_tools}
        arm = {"name": "server", "backend": kind, "target": name, "drafter": None, "settings": settings}
        rows, summary = [asdict(turn) for turn in turns], summarize_soak(turns, limits)
        return make_record("soak", workload=soak_workload(planned), arms=[arm], rows=rows, summary=summary)

    def so_far() -> Found | None:
        missing = [{"arm": "server", "num_rows": num_turns - len(kept)}]
        return (made(with_speeds(kept)), missing) if kept else None

    with ServerClient(url, model=model, api_key=api_key or server_key(), timeout_s=timeout_s) as client:
        name, kind = client.model, client.server_kind()
        how: dict[str, Any] = {"salt": salt, "has_tools": not no_tools, "memory": memory}
        with progress_bar(num_turns) as report, stoppable(file, so_far):
            rows = run_soak(client, planned, **how, progress=report, keep=kept.append)
    written = made(rows)
    file.write(written)
    summary = written["summary"]
    emit_json(summary) if as_json else _show(summary, f"{name} at {url}")
    first_error = next((row.error for row in rows if row.error is not None), None)
    if first_error is not None:
        progress_line(f"first error: {first_error}")
    if not no_tools and all(row.error is not None for row in rows):
        progress_line("no turn was answered; for a server that knows no tools: --no-tools")
    if summary["faults"]:
        raise typer.Exit(1)


def _planned(shape: Shape, num_sessions: int | None, num_turns: int | None) -> Shape:
    for option, number in (("--sessions", num_sessions), ("--turns", num_turns)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} {number} runs nothing. Give at least 1.")
    turns = shape.turns[:num_turns]
    return replace(shape, num_sessions=shape.num_sessions if num_sessions is None else num_sessions, turns=turns)


def _show(summary: dict[str, Any], title: str) -> None:
    table = Table(title=f"Soak of {title}: {summary['verdict'].upper()}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    limits = summary["limits"]
    for name, value in (
        ("turns", f"{summary['num_turns']}"),
        ("errors, silent-empty answers", f"{summary['num_errors']}, {summary['num_empty']}"),
        ("tokens a second, median", _number(summary["tokens_per_s"], 1)),
        ("acceptance length", _number(summary["mean_acceptance_length"], 2)),
        ("speed retention", _with_limit(summary.get("speed_retention"), "≥", limits["min_speed_retention"])),
        ("acceptance drift", _with_limit(summary.get("acceptance_drift"), "≤", limits["max_acceptance_drift"])),
        ("memory growth", _with_limit(summary.get("memory_growth"), "<", limits["max_memory_growth"])),
        ("memory step", _with_limit(summary.get("memory_step"), "<", limits["max_memory_growth"])),
        ("TTFT ratio", _number(summary["ttft_ratio"], 2)),
    ):
        table.add_row(name, value)
    show(table)
    phases = Table(title=_cycle_text(summary))
    for column in ("phase", "turns", "relative speed", "cause"):
        phases.add_column(column)
    for phase in summary["phases"]:
        turns = f"{phase['first']}–{phase['last']}" if phase["first"] < phase["last"] else f"{phase['first']}"
        phases.add_row(phase["name"], turns, _number(phase["relative_speed"], 2), phase["cause"] or "")
    show(phases)
    for name in ("faults", "warnings"):
        for text in summary[name]:
            progress_line(f"{name.removesuffix('s')}: {text}")


def _cycle_text(summary: dict[str, Any]) -> str:
    if not summary["phases"]:
        return "No turn was timed, so there are no phases"
    if summary["is_cycle"]:
        return f"A cycle of {summary['period']:g} turns"
    is_slow = any(phase["name"] == "degraded" for phase in summary["phases"])
    return "Slow phases; a period is not established" if is_slow else "No slow phase"


def _with_limit(value: float | None, sign: str, limit: float) -> str:
    return "not judged" if value is None else f"{100 * value:.1f} % ({sign} {100 * limit:g} %)"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
