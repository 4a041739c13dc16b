"""`outrider bench`: how fast it is, and what of that the memory's bandwidth allows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.backends.dummy_configs import DUMMY_NAMES, dummy_target_config
from outrider.benchmarking.decode import CellKey, CellPlan, decode_record, number_list, plan_cells, run_ours, summarize
from outrider.benchmarking.peer import check_peer, run_peer
from outrider.benchmarking.record import write_record
from outrider.cli import bench_compare, bench_quality, bench_report, bench_run, bench_soak, bench_verify, options
from outrider.cli.output import emit_json, new_file, progress_bar, progress_line, show
from outrider.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure servers and arms; time decoding and kernels on made-up weights.")
app.command()(bench_run.run)
app.command()(bench_run.sweep)
app.command()(bench_compare.compare)
app.command()(bench_soak.soak)
app.command()(bench_verify.verify)
app.command()(bench_quality.quality)

TargetName = Annotated[str, typer.Option(help=f"One of {', '.join(DUMMY_NAMES)}: weights are made up.")]
SHOWN_KERNELS = 12
MIN_PEER_CONTEXT = 8192


@app.command()
def decode(
    target: TargetName,
    num_speculative_tokens: Annotated[
        str, typer.Option("--num-speculative-tokens", "-n", help="Draft length, or several: 0,7.")
    ] = "0",
    acceptance_length: Annotated[
        str | None, typer.Option(help="Imposed: one for all draft lengths above 0, or one for each: 2.9,5.23.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Requests at a time, or several: 1,4.")] = "1",
    prompt_tokens: Annotated[
        str, typer.Option(help="Random token ids of each prompt, or several lengths: 512,8192.")
    ] = "512",
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 512,
    context_length: Annotated[int | None, typer.Option(help="Of the engine; just enough if left out.")] = None,
    prefill_rows: Annotated[int | None, typer.Option(help="Prompt tokens a pass.")] = None,
    runs: Annotated[int, typer.Option(help="Timed runs of each combination.")] = 3,
    traced_cycles: Annotated[int, typer.Option(help="Cycles to take apart afterwards, on a GPU; 0 leaves it out.")] = 8,
    check_exact: Annotated[
        bool, typer.Option("--check-exact", help="Also see whether drafts or neighbours change greedy text.")
    ] = False,
    peer: Annotated[str | None, typer.Option(help="'vllm': between two passes of ours, the same work.")] = None,
    peer_site: Annotated[Path | None, typer.Option(help="Directory that the peer's packages are in.")] = None,
    peer_timeout_s: Annotated[float, typer.Option(help="Seconds that one start of the peer may take.")] = 900.0,
    peer_logs: Annotated[
        Path | None, typer.Option(help="New directory for the peer's log and for what each side has found so far.")
    ] = None,
    drafter_quantization: options.DrafterQuantization = None,
    kernels: options.Kernels = "auto",
    device: options.Device = "auto",
    record: bench_run.Record = None,
    as_json: options.Json = False,
) -> None:
    """Time greedy decoding: tokens a second, milliseconds a cycle and a part, beside what reading the bytes takes."""
    dummy_target_config(target)  # a name that is not known is refused before anything is loaded
    cells = plan_cells(num_speculative_tokens, batch, acceptance_length, prompt_tokens)
    new_file("--record", record)
    settings: dict[str, Any] = {
        "target": target,
        "max_tokens": max_tokens,
        "context_length": context_length,
        "prefill_rows": prefill_rows,
        "num_runs": runs,
        "num_traced_cycles": traced_cycles,
        "is_exactness_checked": check_exact,
        "drafter_quantization": drafter_quantization,
        "kernels": kernels,
        "device": device,
    }
    lists = {
        "--num-speculative-tokens": num_speculative_tokens,
        "--batch": batch,
        "--prompt-tokens": prompt_tokens,
        "--acceptance-length": acceptance_length,
    }
    theirs: dict[CellKey, dict[str, Any]] = {}
    if peer is None:
        ours = [_time_here(settings, cells)]
    else:
        check_peer(peer, peer_site, cells)
        with _log_folder(peer_logs) as folder:
            ours, theirs = _time_both(settings, lists, cells, site=peer_site, folder=folder, timeout_s=peer_timeout_s)
    if record is not None:
        write_record(decode_record(ours, theirs), record)
    summary = summarize(ours, theirs)
    result = {**ours[0], "summary": summary, "again": ours[1:], "peer": list(theirs.values())}
    emit_json(result) if as_json else _show_decode(result)


@app.command()
def kernel(
    target: TargetName,
    kernel: Annotated[list[str] | None, typer.Option(help="products or attention; both if left out.")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of rows of a product.")] = "1,8,16,32,64,128,256",
    contexts: Annotated[str, typer.Option(help="Numbers of positions that attention sees.")] = "512,4096,32768",
    kernels: options.Kernels = "auto",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Time products by name and attention on our kernels and on torch's, each checked against float32."""
    dummy_target_config(target)
    numbers = number_list("--rows", rows, low=1), number_list("--contexts", contexts, low=1)
    from outrider.backends import kernel_timing

    kinds = tuple(kernel or kernel_timing.KINDS)
    with progress_bar(kernel_timing.num_kernel_steps(kinds)) as report:
        result = kernel_timing.time_kernels(
            target, kinds=kinds, rows=numbers[0], contexts=numbers[1], kernels=kernels, device=device, progress=report
        )
    emit_json(result) if as_json else show(_kernel_table(result))


def _kernel_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['target']}: kernels alone; reads reach {result['read_tb_per_s']:.2f} TB/s")
    for column in ("kernel", "rows", "context", "set", "µs", "TB/s", "of floor", "error", "same as alone"):
        table.add_column(column, justify="left" if column in ("kernel", "set") else "right")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            str(row["rows"]),
            "–" if row["context"] is None else str(row["context"]),
            row["kernels"],
            _number(row["us"], 1),
            _number(row["tb_per_s"]),
            _share(row["floor_share"]),
            f"{row['error']:.1e}",
            "yes" if row["same_as_alone"] else "no",
        )
    return table


def _time_here(settings: dict[str, Any], cells: Sequence[CellPlan]) -> dict[str, Any]:
    from outrider.backends import decode_timing

    work = decode_timing.DecodeWork(**settings, prompt_tokens=max(cell.prompt_tokens for cell in cells))
    planned = [decode_timing.Cell(**asdict(cell)) for cell in cells]
    with progress_bar(decode_timing.num_steps(work, planned)) as report:
        return decode_timing.time_decoding(work, planned, progress=report)


def _time_both(
    settings: dict[str, Any],
    lists: dict[str, str | None],
    cells: Sequence[CellPlan],
    *,
    site: Path | None,
    folder: Path,
    timeout_s: float,
) -> tuple[list[dict[str, Any]], dict[CellKey, dict[str, Any]]]:
    """Ours, the peer, ours again, each in a process of its own; parts and exactness are looked at once."""
    progress_line("ours, before the peer")
    before = run_ours(_arguments(settings, lists))
    (folder / "ours.json").write_text(json.dumps(before))
    progress_line("the peer; a start takes minutes")
    longest = max(cell.prompt_tokens for cell in cells) + settings["max_tokens"] + 1
    work = {
        "max_tokens": settings["max_tokens"],
        "context_length": max(MIN_PEER_CONTEXT, settings["context_length"] or 0, longest),
        "runs": settings["num_runs"],
    }
    theirs = run_peer(settings["target"], cells, site=site, folder=folder, work=work, timeout_s=timeout_s)
    progress_line("ours, after the peer")
    again = {**settings, "num_traced_cycles": 0, "is_exactness_checked": False}
    return [before, run_ours(_arguments(again, lists))], theirs


@contextmanager
def _log_folder(asked: Path | None) -> Iterator[Path]:
    """The directory that was asked for, made; else one that is gone afterwards. ConfigError where it is there."""
    if asked is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    if asked.exists():
        raise ConfigError(f"--peer-logs {asked} exists. Name a new directory.")
    asked.mkdir(parents=True)
    yield asked.resolve()


def _arguments(settings: dict[str, Any], lists: dict[str, str | None]) -> list[str]:
    """The command line of one pass of ours."""
    names = {"num_runs": "--runs", "num_traced_cycles": "--traced-cycles"}
    values = {**lists, **{names.get(name, f"--{name.replace('_', '-')}"): value for name, value in settings.items()}}
    flag = values.pop("--is-exactness-checked")
    given = [text for name, value in values.items() if value is not None for text in (name, str(value))]
    return [*given, *(["--check-exact"] if flag else [])]


def _show_decode(result: dict[str, Any]) -> None:
    show(_decode_table(result))
    for cell in result["cells"]:
        if cell["parts"]:
            show(_parts_table(cell))


def _decode_table(result: dict[str, Any]) -> Table:
    title = f"{result['target']} on {result['kernels']} kernels, reads reach {result['read_tb_per_s']:.2f} TB/s"
    columns = (
        "n",
        "batch",
        "prompt",
        "prefill s",
        "accepted",
        "tok/s",
        "ms/cycle",
        "of floor",
        "gap p50, p99 µs",
        "ready s",
        "exact",
        "peer tok/s",
        "ratio",
        "peer prefill s",
        "ratio of prefill",
    )
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row, cell in zip(result["summary"], result["cells"], strict=True):
        exact = {None: "–", True: "yes", False: "NO"}[row["bit_exact"]]
        table.add_row(
            str(row["num_speculative_tokens"]),
            str(row["batch"]),
            str(row["prompt_tokens"]),
            _number(row["prefill_s"], 3),
            _number(cell["measured_acceptance_length"]),
            _number(row["tokens_per_s"], 1),
            _number(row["ms_per_cycle"]),
            _share(row["floor_share"]),
            f"{_number(cell['gap_p50_us'], 0)}, {_number(cell['gap_p99_us'], 0)}",
            _number(cell["ready_s"], 1),
            exact,
            _number(row["peer_tokens_per_s"], 1),
            _number(row["ratio"]),
            _number(row["peer_prefill_s"], 3),
            _number(row["prefill_ratio"]),
        )
    return table


def _parts_table(cell: dict[str, Any]) -> Table:
    where = f"n={cell['num_speculative_tokens']}, batch {cell['batch']}, prompt {cell['prompt_tokens']}"
    table = Table(title=f"{where}: where a cycle goes")
    for column in ("half", "part", "ms", "floor ms", "TB/s", "of floor"):
        table.add_column(column, justify="left" if column in ("half", "part") else "right")
    for row in cell["parts"]:
        figures = (_number(row["ms"]), _number(row["floor_ms"]), _number(row["tb_per_s"]), _share(row["floor_share"]))
        table.add_row(row["half"], row["part"], *figures)
    for kernel in cell["kernels_seen"][:SHOWN_KERNELS]:
        described = f"{kernel['part']}: {kernel['kernel']:.40} {kernel['grid']} × {kernel['per_cycle']:g}"
        table.add_row(kernel["half"], described, _number(kernel["us"] * kernel["per_cycle"] / 1e3), "", "", "")
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


app.command()(bench_report.report)
