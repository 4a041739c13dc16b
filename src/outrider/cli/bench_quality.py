"""`outrider bench quality`: the same answers, and as many right ones, with speculation as without?"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.benchmarking.record import RecordFile, make_record
from outrider.cli import options
from outrider.cli.bench_options import ApiKey, Model, Record, Timeout, Url, server_key
from outrider.cli.output import Found, emit_json, new_file, progress_bar, progress_line, show, stoppable
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.benchmarking.problems import Problem

FAULTS = {
    "different_text": "some answers differ, and greedy ones must not: a fault, or near ties that rounding decides",
    "errors": "some requests failed, and their problems do not count",
    "nothing_drafted": "nothing was drafted with speculation on: plain was compared with plain",
    "accuracy": "fewer answers are right with speculation, by more than chance allows",
}


def quality(
    url: Url,
    gsm8k: Annotated[Path | None, typer.Option(help="A JSONL file of GSM8K: question, answer with '#### N'.")] = None,
    calls: Annotated[
        Path | None, typer.Option(help="A JSONL file of tool calls: messages, tools, expected {name, arguments}.")
    ] = None,
    human_eval: Annotated[
        bool, typer.Option("--human-eval", help="HumanEval of the human-eval package; runs what the model wrote.")
    ] = False,
    allow_code_execution: Annotated[
        bool,
        typer.Option("--allow-code-execution", help="Let programs run here, with little time, memory and no more."),
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Take the first so many problems of each set.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 1024,
    plain_url: Annotated[
        str | None, typer.Option(help="A server without a drafter, for those that cannot switch it off by request.")
    ] = None,
    model: Model = None,
    api_key: ApiKey = None,
    timeout_s: Timeout = 600.0,
    record: Record = None,
    as_json: options.Json = False,
) -> None:
    """Compare answers with speculation on and off; exit code 1 if a text differs or accuracy fell.

    Without a file or --human-eval it asks a small set of our own: sums in words, and tool calls.
    """
    from outrider.benchmarking.client import ServerClient
    from outrider.benchmarking.problems import problems_workload
    from outrider.benchmarking.quality import PLAIN, SPECULATIVE, Answer, run_quality, summarize_quality

    if human_eval and not allow_code_execution:
        raise ConfigError("--human-eval runs programs that a model wrote. Add --allow-code-execution if you want that.")
    name, problems = _problems(gsm8k, calls, is_human_eval=human_eval, limit=limit, max_tokens=max_tokens)
    new_file("--record", record)
    urls = {PLAIN: plain_url or url, SPECULATIVE: url}
    servers: dict[str, Any] = {"model": model, "api_key": api_key or server_key(), "timeout_s": timeout_s}
    file, pairs = RecordFile(record), list[tuple[Answer, Answer]]()

    def made() -> dict[str, Any]:
        arm = {"backend": kind, "target": target, "drafter": None}
        settings = {"max_tokens": max_tokens, "temperature": 0.0}
        return make_record(
            "quality",
            workload=problems_workload(name, problems),
            arms=[{"name": each, **arm, "settings": {"url": urls[each], **settings}} for each in urls],
            rows=[asdict(answer) for pair in pairs for answer in pair],
            summary=summarize_quality(pairs),
        )

    def so_far() -> Found | None:
        missing = [{"arm": each, "num_rows": len(problems) - len(pairs)} for each in urls]
        return (made(), missing) if pairs else None

    with (
        ServerClient(url, **servers) as client,
        ServerClient(plain_url, **servers) if plain_url is not None else nullcontext() as plain,
        progress_bar(2 * len(problems)) as report,
    ):
        target, kind = client.model, client.server_kind()
        how: dict[str, Any] = {"plain_client": plain, "max_tokens": max_tokens, "progress": report}
        with stoppable(file, so_far):
            run_quality(client, problems, **how, keep=pairs.append)
    written = made()
    file.write(written)
    summary = written["summary"]
    emit_json(summary) if as_json else _show(summary, f"{target}: {name}")
    for fault in summary["faults"]:
        progress_line(f"fault: {FAULTS[fault]}")
    if not summary["drafting_confirmed"] and "nothing_drafted" not in summary["faults"]:
        progress_line("warning: the server says nothing of its drafts, so both arms may have been the same")
    if summary["faults"]:
        raise typer.Exit(1)


def _problems(
    gsm8k: Path | None, calls: Path | None, *, is_human_eval: bool, limit: int | None, max_tokens: int
) -> tuple[str, list[Problem]]:
    from outrider.benchmarking.problems import human_eval_problems, own_problems, read_calls, read_gsm8k

    if max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens} leaves no answer. Give at least 1.")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit} leaves no problem. Give at least 1.")
    sets = {}
    if gsm8k is not None:
        sets["gsm8k"] = read_gsm8k(gsm8k)
    if calls is not None:
        sets["calls"] = read_calls(calls)
    if is_human_eval:
        sets["human-eval"] = human_eval_problems()
    sets = sets or {"own": own_problems()}
    return "+".join(sets), [problem for each in sets.values() for problem in each[:limit]]


def _show(summary: dict[str, Any], title: str) -> None:
    num_sound = summary["num_problems"] - summary["num_errors"]
    table = Table(title=f"{title}: {summary['num_same_text']} of {num_sound} answers are the same text")
    for column in ("problems", "number", "same text", "right, plain", "right, speculative"):
        table.add_column(column, justify="left" if column == "problems" else "right")
    for kind, row in summary["by_kind"].items():
        shares = (_percent(row["plain"]), _percent(row["speculative"]))
        table.add_row(kind, str(row["num_problems"]), str(row["num_same_text"]), *shares)
    accuracy = summary["accuracy"]
    totals = (str(num_sound), str(summary["num_same_text"]))
    table.add_row("all", *totals, _percent(accuracy["plain"]), _percent(accuracy["speculative"]), style="bold")
    show(table)
    if summary["mcnemar_p"] is not None:
        show(
            f"Only plain right: {summary['only_plain_right']}; only speculative: {summary['only_speculative_right']}. "
            f"McNemar exact p = {summary['mcnemar_p']:.3g}; {num_sound} problems allow that up to "
            f"{100 * summary['max_discordance']:.1f} % of all such problems are judged differently (95 %)."
        )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
