"""`outrider bench sweep`: the fastest draft length of any server, workload by workload."""

from __future__ import annotations

from contextlib import ExitStack
from math import inf
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.benchmarking.decode import number_list
from outrider.benchmarking.record import RecordFile
from outrider.cli import options
from outrider.cli.bench_options import (
    ApiKey,
    Body,
    IgnoreEos,
    MaxTokens,
    Model,
    Record,
    Requests,
    Timeout,
    Warmups,
    WorkloadName,
    body_fields,
    check_packages,
    figure,
    server_key,
)
from outrider.cli.output import Found, emit_json, new_file, progress_bar, show, stoppable
from outrider.errors import ConfigError

SweepUrls = Annotated[
    list[str],
    typer.Argument(
        metavar="URL...",
        help="Of a server that takes a draft length by request; or servers by the length that each was started with: "
        "0=http://127.0.0.1:8000 4=http://127.0.0.1:8001.",
    ),
]
DRAFT_LENGTHS = "0,3,5,7"


def sweep(
    urls: SweepUrls,
    workload: WorkloadName = None,
    model: Model = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-speculative-tokens",
            "-n",
            help=f"Draft lengths, asked for by request; 0 is plain. {DRAFT_LENGTHS} if left out.",
        ),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one or several: 1,4.")] = "1",
    context_tokens: Annotated[
        str | None, typer.Option(help="Tokens of each prompt, one or several: 512,4096; as they are if left out.")
    ] = None,
    temperature: Annotated[str, typer.Option(help="One or several: 0,0.7.")] = "0",
    rounds: Annotated[int, typer.Option(help="Times each combination is run, interleaved.")] = 3,
    num_requests: Requests = 16,
    num_warmups: Warmups = None,
    max_tokens: MaxTokens = 256,
    ignore_eos: IgnoreEos = False,
    body: Body = None,
    api_key: ApiKey = None,
    timeout_s: Timeout = 600.0,
    record: Record = None,
    as_json: options.Json = False,
) -> None:
    """Find the fastest draft length for each workload, concurrency, context length and temperature.

    Combinations are interleaved and compared prompt by prompt. Exit code 1 where something spoiled a run.
    """
    check_packages()
    from outrider.benchmarking.client import ServerClient
    from outrider.benchmarking.request_sets import load_request_set
    from outrider.benchmarking.runner import Load, Run
    from outrider.benchmarking.sweep import Cell, Plan, run_sweep, summarize_sweep, sweep_record, whole_rounds

    places, are_fixed = _urls_by_length(urls, num_speculative_tokens)
    sets = [load_request_set(each) for each in dict.fromkeys(workload or ["chat", "code"])]
    names = [each.name for each in sets]
    plan = Plan(
        draft_lengths=list(places),
        concurrencies=number_list("--concurrency", concurrency, low=1),
        context_tokens=number_list("--context-tokens", context_tokens, low=1) if context_tokens else (None,),
        temperatures=_temperatures(temperature),
        num_rounds=rounds,
    )
    load = Load(
        num_requests=num_requests,
        num_warmups=num_warmups,
        max_tokens=max_tokens,
        extra=body_fields(body, ignore_eos=ignore_eos),
    )
    new_file("--record", record)
    file, kept = RecordFile(record), dict[Cell, list[Run]]()
    num_cells = len(plan.conditions(names)) * len(places)

    def made(runs: dict[Cell, list[Run]], rows: list[dict[str, Any]]) -> dict[str, Any]:
        return sweep_record(runs, sets, rows, name=record.stem if record else "sweep", urls=places, model=target)

    def so_far() -> Found | None:
        whole = whole_rounds(kept, num_cells)
        num_rows = num_requests * (plan.num_runs(names) - sum(map(len, kept.values())))
        return (made(kept, summarize_sweep(whole)), [{"arm": "all", "num_rows": num_rows}]) if kept else None

    servers: dict[str, Any] = {"model": model, "api_key": api_key or server_key(), "timeout_s": timeout_s}
    with ExitStack() as stack:
        by_url = {url: stack.enter_context(ServerClient(url, **servers)) for url in dict.fromkeys(places.values())}
        clients = {length: by_url[url] for length, url in places.items()}
        first = next(iter(by_url.values()))
        target = first.model
        with progress_bar(plan.num_runs(names)) as advance, stoppable(file, so_far):
            runs = run_sweep(
                clients if are_fixed else first,
                sets,
                plan,
                load,
                progress=advance,
                keep=lambda cell, run: kept.setdefault(cell, []).append(run),
            )
    rows = summarize_sweep(runs)
    file.write(made(runs, rows))
    emit_json({"summary": rows}) if as_json else _show_sweep(rows, target)
    if any(row["faults"] for row in rows):
        raise typer.Exit(1)


def _urls_by_length(given: list[str], draft_lengths: str | None) -> tuple[dict[int, str], bool]:
    """A URL for each draft length, and whether those are servers started with it; else all are one server's.

    ConfigError for several of which one has no draft length, and for draft lengths beside such servers.
    """
    if len(given) == 1 and not given[0][:1].isdecimal():
        lengths = number_list("--num-speculative-tokens", draft_lengths or DRAFT_LENGTHS, low=0)
        return dict.fromkeys(lengths, given[0]), False
    pairs = [each.partition("=") for each in given]
    if any(not (length.isdecimal() and url) for length, _, url in pairs):
        raise ConfigError(f"{' '.join(given)!r}: give one URL, or servers by their draft lengths: 0=URL 4=URL.")
    if draft_lengths is not None:
        raise ConfigError("--num-speculative-tokens: servers given as 0=URL 4=URL have theirs. Leave it out.")
    if len({int(length) for length, _, _ in pairs}) < len(pairs):
        raise ConfigError(f"{' '.join(given)!r}: two servers have one draft length. Give each its own.")
    return {int(length): url for length, _, url in pairs}, True


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--temperature {text!r} is not a list of numbers, as in 0,0.7.") from None
    if not all(0 <= each < inf for each in found) or len(set(found)) < len(found):
        raise ConfigError(f"--temperature {text!r} has a number below 0 or none at all, or one twice.")
    return found


def _show_sweep(rows: list[dict[str, Any]], target: str) -> None:
    table = Table(title=f"{target}: speed by draft length")
    left = ("workload", "faults")
    columns = (
        "workload",
        "at a time",
        "prompt tokens",
        "temp.",
        "n",
        "tok/s",
        "accepted",
        "of the best",
        "95 %",
        "faults",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        low, high = row["ratio_interval"] or (None, None)
        table.add_row(
            row["workload"],
            str(row["concurrency"]),
            figure(row["num_prompt_tokens"], digits=0),
            f"{row['temperature']:g}",
            f"{row['num_speculative_tokens']}{' ◂' if row['is_best'] else ''}",
            figure(row["output_tokens_per_s"]),
            figure(row["mean_acceptance_length"], digits=2),
            "best" if row["is_best"] else figure(row["ratio_to_best"], digits=3),
            "–" if low is None else f"{low:.3f} – {high:.3f}",
            ", ".join(row["faults"]),
        )
    show(table)
    for row in rows:
        if row["is_best"]:
            show(_verdict(row, [each for each in rows if _condition(each) == _condition(row)]))


def _condition(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["workload"], row["concurrency"], row["context_tokens"], row["temperature"]


def _verdict(best: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    length = best["num_speculative_tokens"]
    where = f"{best['workload']}, {best['concurrency']} at a time, temperature {best['temperature']:g}"
    tied = [
        row["num_speculative_tokens"]
        for row in rows
        if not row["is_best"] and (row["ratio_interval"] is None or row["ratio_interval"][1] >= 1)
    ]
    others = f"; not told apart from n = {', '.join(map(str, tied))}" if tied else ""
    if any(row["faults"] for row in rows):
        others += "; but runs were spoiled: see faults, and measure again"
    if best["drafter_loses"]:
        return f"{where}: the drafter loses here, n = 0 is fastest{others}"
    return f"{where}: n = {length} is fastest{others}"
