"""`outrider bench run` and `bench sweep`: any server over HTTP, measured from outside and by its own counters."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.benchmarking.decode import number_list
from outrider.cli import options
from outrider.cli.output import emit_json, new_file, progress_bar, show
from outrider.errors import ConfigError

KEY_VARIABLE = "OUTRIDER_API_KEY"
OWN_FIELDS = {"model", "messages", "prompt", "max_tokens", "temperature", "stream", "stream_options", "tools"}

Url = Annotated[str, typer.Argument(help="Of a server that speaks OpenAI's API, such as http://127.0.0.1:8000.")]
_WORKLOADS = (
    "narrative, code, chat, tools, math, languages or long-context; demo for base models; or a JSONL file in "
    "OpenAI's (messages), ShareGPT's (conversations) or Spec-Bench's (turns) shape."
)
WorkloadName = Annotated[list[str] | None, typer.Option("--workload", "-w", help=_WORKLOADS)]
WorkloadText = Annotated[str, typer.Option("--workload", "-w", help=_WORKLOADS)]
Model = Annotated[str | None, typer.Option(help="As the server names it; the first it serves if left out.")]
ApiKey = Annotated[str | None, typer.Option(help=f"Bearer key; {KEY_VARIABLE} in the environment does the same.")]
Requests = Annotated[int, typer.Option("--num-requests", help="Requests that count, of each run.")]
Warmups = Annotated[
    int | None,
    typer.Option("--num-warmups", help="Requests before them; at least 4 and twice the concurrency if left out."),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of each answer.")]
Timeout = Annotated[float, typer.Option("--timeout-s", help="Seconds that an answer may keep silent.")]
Body = Annotated[list[str] | None, typer.Option("--body", help="A field of every request: NAME=JSON; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Write on to --max-tokens, as most servers can.")]
Record = Annotated[Path | None, typer.Option(help="Also write a record with raw rows to this new file.")]


SweepUrls = Annotated[
    list[str],
    typer.Argument(
        metavar="URL...",
        help="Of a server that takes a draft length by request; or servers by the length that each was started with: "
        "0=http://127.0.0.1:8000 4=http://127.0.0.1:8001.",
    ),
]
DRAFT_LENGTHS = "0,3,5,7"


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
    _check_packages()
    from outrider.benchmarking.client import ServerClient
    from outrider.benchmarking.request_sets import load_request_set
    from outrider.benchmarking.run_summary import run_record, summarize
    from outrider.benchmarking.runner import Load, run_load

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
    with ServerClient(url, model=model, api_key=api_key or _key(), timeout_s=timeout_s) as client:
        name = client.model
        with progress_bar(load.warmups + load.num_requests) as advance:
            found = run_load(client, request_set, load, progress=lambda: advance(request_set.name))
    summary = summarize(found)
    if record is not None:
        from outrider.benchmarking.record import write_record

        made = run_record(found, request_set, name=record.stem, summary=summary, url=url, model=name)
        write_record(made, record)
    emit_json(summary) if as_json else _show_run(summary, f"{name} on {found.server}: {request_set.name}")
    if summary["integrity"]["status"] != "ok":
        raise typer.Exit(1)


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
    _check_packages()
    from outrider.benchmarking.client import ServerClient
    from outrider.benchmarking.request_sets import load_request_set
    from outrider.benchmarking.runner import Load
    from outrider.benchmarking.sweep import Plan, run_sweep, summarize_sweep, sweep_record

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
    with ExitStack() as stack:
        by_url = {
            url: stack.enter_context(ServerClient(url, model=model, api_key=api_key or _key(), timeout_s=timeout_s))
            for url in dict.fromkeys(places.values())
        }
        clients = {length: by_url[url] for length, url in places.items()}
        first = next(iter(by_url.values()))
        target = first.model
        with progress_bar(plan.num_runs(names)) as advance:
            runs = run_sweep(clients if are_fixed else first, sets, plan, load, progress=advance)
    rows = summarize_sweep(runs)
    if record is not None:
        from outrider.benchmarking.record import write_record

        write_record(sweep_record(runs, sets, rows, name=record.stem, urls=places, model=target), record)
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


def _check_packages() -> None:
    """ConfigError where the packages that measuring needs are not installed."""
    missing = [name for name in ("httpx", "prometheus_client", "scipy") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed. Run: pip install 'outrider[bench]'.")


def body_fields(given: list[str] | None, *, ignore_eos: bool = False) -> dict[str, Any]:
    """Fields of a request's body from NAME=JSON; ConfigError names what is neither."""
    fields: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
    for each in given or []:
        name, has_value, text = each.partition("=")
        try:
            if not name or not has_value:
                raise ValueError
            fields[name] = json.loads(text)
        except ValueError:
            raise ConfigError(
                f"--body {each!r} is not NAME=JSON. Write it as speculative='{{\"enabled\": false}}' or top_p=0.9."
            ) from None
    if own := sorted(set(fields) & OWN_FIELDS):
        raise ConfigError(f"--body {own[0]}: this command sets it, by an option or because it must. Leave it out.")
    return fields


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--temperature {text!r} is not a list of numbers, as in 0,0.7.") from None
    if not all(0 <= each < inf for each in found) or len(set(found)) < len(found):
        raise ConfigError(f"--temperature {text!r} has a number below 0 or none at all, or one twice.")
    return found


def _key() -> str | None:
    return os.environ.get(KEY_VARIABLE)


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
        table.add_row(label, *(_number(spread.get(key), factor) for key in ("mean", "p50", "p90", "p99", "max")))
    show(table)
    for line in _run_lines(summary):
        show(line)


def _run_lines(summary: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{_number(summary['output_tokens_per_s'])} tok/s by usage, {_number(summary['counted_tokens_per_s'])} by the "
        f"server's counters; {summary['completed']} of {summary['num_requests']} answers, "
        f"{summary['num_warmups']} warm-ups before them"
    )
    if summary["mean_acceptance_length"] is not None:
        positions = " ".join(f"{share:.2f}" for share in summary["acceptance_by_position"] or ())
        yield (
            f"acceptance length {_number(summary['mean_acceptance_length'], digits=2)}, rate "
            f"{_share(summary['acceptance_rate'])}, by position {positions or '–'}; drafted in "
            f"{_share(summary['fire_rate_steps'])} of steps, {_share(summary['fire_rate_requests'])} of requests"
        )
    yield f"integrity: {summary['integrity']['status']}"
    for each in summary["integrity"]["findings"]:
        yield f"  {'INVALID' if each['is_fatal'] else 'note'} {each['name']}: {each['detail']}"


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
            _number(row["num_prompt_tokens"], digits=0),
            f"{row['temperature']:g}",
            f"{row['num_speculative_tokens']}{' ◂' if row['is_best'] else ''}",
            _number(row["output_tokens_per_s"]),
            _number(row["mean_acceptance_length"], digits=2),
            "best" if row["is_best"] else _number(row["ratio_to_best"], digits=3),
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


def _number(value: float | None, factor: float = 1.0, *, digits: int = 1) -> str:
    return "–" if value is None else f"{factor * value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
