"""`outrider bench run`: any server over HTTP, measured from outside and by its own counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

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
    Url,
    Warmups,
    WorkloadName,
    body_fields,
    check_packages,
    figure,
    percentage,
    server_key,
)
from outrider.cli.output import Found, emit_json, new_file, progress_bar, show, stoppable
from outrider.errors import ConfigError


def run(
    url: Url,
    workload: WorkloadName = None,
    model: Model = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight (closed loop).")] = 1,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests a second at random times (open loop), instead of --concurrency.")
    ] = None,
    num_requests: Requests = 32,
    num_warmups: Warmups = None,
    max_tokens: MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of salts and arrivals; drawn anew if left out: no prompt was seen before."),
    ] = None,
    no_salt: Annotated[
        bool, typer.Option("--no-salt", help="Send prompts as they are, though a prefix cache may know them.")
    ] = False,
    expected_cached_share: Annotated[
        float, typer.Option(help="Share of prompt tokens that you mean to be cached.")
    ] = 0.0,
    ignore_eos: IgnoreEos = False,
    body: Body = None,
    api_key: ApiKey = None,
    timeout_s: Timeout = 600.0,
    record: Record = None,
    as_json: options.Json = False,
) -> None:
    """Measure a server: latencies, tokens a second, acceptance, and whether the figures may be believed.

    Tokens are the server's own count, never chunks; the first requests are discarded. Exit code 1 where something
    spoiled the run: it is named under integrity.
    """
    check_packages()
    from outrider.benchmarking.client import ServerClient
    from outrider.benchmarking.request_sets import load_request_set
    from outrider.benchmarking.run_summary import run_record, summarize
    from outrider.benchmarking.runner import Load, Run, run_load

    if workload and len(workload) > 1:
        raise ConfigError("bench run asks one workload; leave one --workload, or use bench sweep.")
    request_set = load_request_set((workload or ["chat"])[0])
    load = Load(
        num_requests=num_requests,
        num_warmups=num_warmups,
        concurrency=concurrency,
        request_rate=request_rate,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        is_salted=not no_salt,
        expected_cached_share=expected_cached_share,
        extra=body_fields(body, ignore_eos=ignore_eos),
    )
    new_file("--record", record)
    file, stopped = RecordFile(record), list[Run]()

    def made(run: Run) -> dict[str, Any]:
        about = {"name": record.stem if record else "run", "url": url, "model": name}
        return run_record(run, request_set, summary=summarize(run), **about)

    def so_far() -> Found | None:
        missing = [{"arm": name, "num_rows": num_requests - len(run.samples)} for run in stopped]
        return (made(stopped[0]), missing) if stopped else None

    with ServerClient(url, model=model, api_key=api_key or server_key(), timeout_s=timeout_s) as client:
        name = client.model
        with progress_bar(load.warmups + num_requests) as advance, stoppable(file, so_far):
            found = run_load(client, request_set, load, progress=lambda: advance(request_set.name), keep=stopped.append)
    summary = summarize(found)
    file.write(made(found))
    emit_json(summary) if as_json else _show_run(summary, f"{name} on {found.server}: {request_set.name}")
    if summary["integrity"]["status"] != "ok":
        raise typer.Exit(1)


def _show_run(summary: dict[str, Any], title: str) -> None:
    table = Table(title=title)
    for column in ("", "mean", "p50", "p90", "p99", "most"):
        table.add_column(column, justify="left" if not column else "right")
    for name, label, factor in (
        ("ttft_s", "first token, ms", 1e3),
        ("tpot_s", "per token, ms", 1e3),
        ("chunk_gap_s", "between chunks, ms", 1e3),
        ("e2e_latency_s", "whole answer, s", 1.0),
        ("decode_tokens_per_s", "decoding, tok/s", 1.0),
    ):
        spread = summary[name] or {}
        table.add_row(label, *(figure(spread.get(key), factor) for key in ("mean", "p50", "p90", "p99", "max")))
    show(table)
    for line in _run_lines(summary):
        show(line)


def _run_lines(summary: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{figure(summary['output_tokens_per_s'])} tok/s by usage, {figure(summary['counted_tokens_per_s'])} by the "
        f"server's counters; {summary['completed']} of {summary['num_requests']} answers, "
        f"{summary['num_warmups']} warm-ups before them"
    )
    if summary["mean_acceptance_length"] is not None:
        positions = " ".join(f"{share:.2f}" for share in summary["acceptance_by_position"] or ())
        yield (
            f"acceptance length {figure(summary['mean_acceptance_length'], digits=2)}, rate "
            f"{percentage(summary['acceptance_rate'])}, by position {positions or '–'}; drafted "
            f"in {percentage(summary['fire_rate_steps'])} of steps, "
            f"{percentage(summary['fire_rate_requests'])} of requests"
        )
    yield f"integrity: {summary['integrity']['status']}"
    for each in summary["integrity"]["findings"]:
        yield f"  {'INVALID' if each['is_fatal'] else 'note'} {each['name']}: {each['detail']}"
