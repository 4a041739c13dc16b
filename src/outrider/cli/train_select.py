"""`outrider train select`: drafters ranked by what a cycle is worth with them on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.cli import options
from outrider.cli.output import Found, emit_json, new_file, progress_line, show, stoppable
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.backends.local import LLM
    from outrider.benchmarking.request_sets import RequestSet
    from outrider.training.acceptance import HeldOutPrompt, MeasureOptions

NAME = "train-select"
DOMAINS = ("narrative", "code", "chat", "math", "languages")
VERDICTS = {"no difference shown": "", "too few prompts": "too few"}
MAX_OFFLINE_ERROR = 0.03  # beyond it, an offline figure tells another story than serving does


def select(
    drafters: Annotated[list[str], typer.Argument(help="Directories, or hub's owner/name: what `train run` wrote.")],
    baseline: Annotated[
        str, typer.Option(help="The drafter to beat; 'auto' is the one shipped for the embedded default.")
    ] = "auto",
    workload: Annotated[
        list[str] | None,
        typer.Option(help="A domain of held-out prompts: a shipped set or a JSONL file. May be given several times."),
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="Of each domain; all if left out.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="0 is greedy. May be given several times.")] = None,
    rounds: Annotated[int, typer.Option(help="Answers to each prompt at a temperature above 0.")] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Sample the same text with every drafter (match sampling); else rejection.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    confidence: Annotated[float, typer.Option(help="Of the intervals, between 0.5 and 1.")] = 0.95,
    offline: Annotated[bool, typer.Option(help="Also walk offline over greedy answers, as a trainer does.")] = True,
    target: options.Target = None,
    num_speculative_tokens: options.DraftLength = None,
    context_length: options.ContextLength = 1024,
    concurrency: Annotated[int, typer.Option(help="Prompts under way at a time.")] = 4,
    kernels: options.Kernels = "auto",
    device: options.Device = "auto",
    record: Annotated[Path | None, typer.Option(help="Also write a record with raw rows to this new file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Rank drafters by the acceptance length of the real cycle, domain by domain, paired by prompt with a baseline.

    Exit code 1 where greedy text is not the same with every drafter: a fault of the engine, never of a drafter.
    """
    new_file("--record", record)
    temperatures = tuple(dict.fromkeys(temperature or (0.0,)))
    _check(temperatures, rounds=rounds, max_tokens=max_tokens, concurrency=concurrency, confidence=confidence)
    import outrider
    from outrider.benchmarking.record import RecordFile
    from outrider.benchmarking.selection import different_texts
    from outrider.training.acceptance import MeasureOptions

    sets = [_chosen(name, prompts) for name in workload or DOMAINS]
    paths = _paths(baseline, drafters, target)
    measuring = MeasureOptions(
        temperatures=temperatures,
        max_tokens=max_tokens,
        num_rounds=rounds,
        seed=seed,
        num_speculative_tokens=num_speculative_tokens,
        with_offline=offline,
    )
    config = outrider.EngineConfig(context_length=context_length, max_seats=concurrency)
    llm = outrider.load(target, drafter=None, config=config, kernels=kernels, device=device, progress=progress_line)
    file, kept = RecordFile(record), list[Found]()

    def keep(result: dict[str, Any], missing: list[dict[str, Any]]) -> None:
        kept[:] = [(result, missing)]
        file.write(result, missing=missing)

    with stoppable(file, lambda: kept[0] if kept else None):
        result = _measured(llm, paths, sets, measuring, keep, target=target or "embedded", confidence=confidence)
    differing = different_texts(result["rows"])
    if as_json:
        emit_json(result)
    else:
        _show(result["summary"], differing)
    if differing:
        raise typer.Exit(1)


def _check(temperatures: Sequence[float], *, rounds: int, max_tokens: int, concurrency: int, confidence: float) -> None:
    bounds = (
        ("--temperature", min(temperatures), min(temperatures) >= 0, "0 for greedy or a number above"),
        ("--rounds", rounds, rounds >= 1, "at least 1"),
        ("--max-tokens", max_tokens, max_tokens >= 2, "at least 2: the first token takes no cycle"),
        ("--concurrency", concurrency, concurrency >= 1, "at least 1"),
        ("--confidence", confidence, 0.5 < confidence < 1, "between 0.5 and 1"),
    )
    for option, value, is_right, wanted in bounds:
        if not is_right:
            raise ConfigError(f"{option} {value} cannot be. Give {wanted}.")


def _chosen(name: str, num_prompts: int | None) -> RequestSet:
    from outrider.benchmarking.request_sets import RequestSet, load_request_set

    found = load_request_set(name)
    if num_prompts is not None and not 1 <= num_prompts <= len(found.items):
        raise ConfigError(f"--prompts {num_prompts}, but {name} has {len(found.items)}. Give from 1 to so many.")
    return RequestSet(found.name, found.items[:num_prompts])


def _paths(baseline: str, drafters: Sequence[str], target: str | None) -> dict[str, Path]:
    """Directories by name, the baseline first: the folder's name, or the whole text where two share that."""
    from outrider.backends.local import drafter_path

    first = drafter_path(baseline, target=target)
    if first is None:
        raise ConfigError(f"--baseline {baseline} is for the embedded default only. Name a drafter of this target.")
    given = {str(first): first, **{text: drafter_path(text, target=target) for text in drafters}}
    found = {text: path for text, path in given.items() if path is not None}
    names = [path.name for path in found.values()]
    if len({path.resolve() for path in found.values()}) < 2:
        raise ConfigError("there is nothing to compare the baseline with. Name another drafter.")
    return {path.name if names.count(path.name) == 1 else text: path for text, path in found.items()}


def _measured(
    llm: LLM,
    paths: dict[str, Path],
    sets: Sequence[RequestSet],
    measuring: MeasureOptions,
    keep: Callable[[dict[str, Any], list[dict[str, Any]]], None],
    *,
    target: str,
    confidence: float,
) -> dict[str, Any]:
    """The record, kept after every drafter with those that are missing of it."""
    from outrider.benchmarking.record import make_record
    from outrider.benchmarking.selection import summarize
    from outrider.benchmarking.workloads import Workload
    from outrider.training.acceptance import drafter_of, measure_drafter
    from outrider.weights.loader import directory_sha256

    asked = _held_out(llm, sets, target)
    workload = Workload(", ".join(each.name for each in sets), tuple(each.text for each in asked))
    rows: list[dict[str, Any]] = []
    arms: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for name, path in paths.items():
        drafting = llm.with_drafter(path, target_name=target)
        rows += measure_drafter(drafting, name, asked, measuring, progress=progress_line)
        used = measuring.num_speculative_tokens or drafting.num_speculative_tokens
        settings = {**asdict(measuring), "num_speculative_tokens": used, "kernels": llm.kernels_name}
        settings["block_size"] = drafter_of(drafting).config.block_size
        identity = {"drafter": path.name, "drafter_sha256": directory_sha256(path)}
        arms.append({"name": name, "backend": "local", "target": target, **identity, "settings": settings})
        summary = summarize(rows, baseline=next(iter(paths)), confidence=confidence)
        result = make_record(NAME, workload=workload, arms=arms, rows=rows, summary=summary)
        keep(result, [{"drafter": each} for each in list(paths)[len(arms) :]])
    return result


def _held_out(llm: LLM, sets: Sequence[RequestSet], target: str) -> list[HeldOutPrompt]:
    """All prompts as text, chats through the target's template."""
    from outrider.benchmarking.arms import Rendering
    from outrider.cli.bench_compare import chat_renderer
    from outrider.training.acceptance import HeldOutPrompt

    render = chat_renderer(llm, target)
    found = []
    for each in sets:
        for index, item in enumerate(each.items):
            made = Rendering(text=item.prompt) if item.prompt is not None else render(item)
            found.append(
                HeldOutPrompt(
                    domain=each.name,
                    index=index,
                    text=made.text,
                    stop_strings=tuple(made.stop_strings),
                    stop_token_ids=tuple(made.stop_token_ids),
                )
            )
    return found


def _show(summary: Sequence[dict[str, Any]], differing: Sequence[str]) -> None:
    from outrider.benchmarking.selection import ranking

    show(_table(summary))
    show(f"Best first: {', '.join(ranking(summary))}. Against {summary[0]['baseline']}, paired by prompt.")
    for line in offline_remarks(summary):
        show(line)
    if differing:
        show(f"Greedy text differs between drafters, which must not be: {'; '.join(differing)}.")


def offline_remarks(summary: Sequence[dict[str, Any]]) -> list[str]:
    """How far each drafter's offline walk is from what serving accepted on the same prompts, over all domains."""
    domain = summary[0]["domain"]  # the first is the one that stands for all
    found = []
    for each in summary:
        if each["domain"] == domain and each["offline_error_share"] is not None:
            error = abs(each["offline_error_share"])
            trusted = "" if error <= MAX_OFFLINE_ERROR else ": it cannot be trusted"
            found.append(
                f"{each['drafter']}: the offline walk is {100 * error:.1f} % off what serving accepted{trusted}."
            )
    return found


def _table(summary: Sequence[dict[str, Any]]) -> Table:
    temperatures = {each["temperature"] for each in summary}
    same = f", temperature {summary[0]['temperature']:g}" if len(temperatures) == 1 else ""
    table = Table(title=f"Tokens a cycle is worth on held-out prompts{same}")
    interval = f"{100 * summary[0]['confidence']:g} %\ninterval"
    columns = ("domain", "T", "drafter", "tokens\na cycle", "differ-\nence", interval, "")
    for column in columns if len(temperatures) > 1 else (columns[0], *columns[2:]):
        table.add_column(column, justify="left" if column in ("domain", "drafter", "") else "right", overflow="fold")
    for each in summary:
        low_high = each["interval"]
        cells = [
            each["domain"],
            f"{each['temperature']:g}",
            each["drafter"],
            "–" if each["mean_acceptance_length"] is None else f"{each['mean_acceptance_length']:.3f}",
            "–" if each["difference"] is None else f"{each['difference']:+.3f}",
            f"{low_high[0]:+.2f} … {low_high[1]:+.2f}" if low_high else "–",
            VERDICTS.get(each["verdict"], each["verdict"] or "baseline"),
        ]
        table.add_row(*(cells if len(temperatures) > 1 else (cells[0], *cells[2:])))
    return table
