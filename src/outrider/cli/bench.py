"""`outrider bench`: how fast it is, and what of that the memory's bandwidth allows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.backends.dummy_configs import DUMMY_NAMES, dummy_target_config
from outrider.benchmarking.decode import DecodeTable, cell_key, number_list, plan_cells, run_ours
from outrider.benchmarking.peer import check_peer, run_peer
from outrider.benchmarking.record import RecordFile
from outrider.cli import (
    bench_compare,
    bench_options,
    bench_quality,
    bench_report,
    bench_run,
    bench_soak,
    bench_sweep,
    bench_verify,
    options,
)
from outrider.cli.bench_tables import kernel_table, show_decode
from outrider.cli.output import emit_json, new_file, progress_bar, progress_line, show, stoppable
from outrider.errors import ConfigError, EngineFault

app = typer.Typer(no_args_is_help=True, help="Measure servers and arms; time decoding and kernels on made-up weights.")
app.command()(bench_run.run)
app.command()(bench_sweep.sweep)
app.command()(bench_compare.compare)
app.command()(bench_soak.soak)
app.command()(bench_verify.verify)
app.command()(bench_quality.quality)

TargetName = Annotated[str, typer.Option(help=f"One of {', '.join(DUMMY_NAMES)}: weights are made up.")]
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
    record: bench_options.Record = None,
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
    table, file = DecodeTable(cells, has_peer=peer is not None), RecordFile(record)
    with stoppable(file, lambda: (table.record(), table.missing()) if table.ours else None):
        if peer is None:
            _time_here(settings, table, file)
        else:
            check_peer(peer, peer_site, cells)
            with _log_folder(peer_logs) as folder:
                _time_both(settings, lists, table, file, site=peer_site, folder=folder, timeout_s=peer_timeout_s)
    missing = table.missing()
    result = {
        **table.ours[0],
        "summary": table.summary(),
        "again": table.ours[1:],
        "peer": list(table.peer.values()),
        "missing": missing,
    }
    emit_json(result) if as_json else show_decode(result)
    for each in missing:
        where = f"n={each['num_speculative_tokens']}, batch {each['batch']}, prompt {each['prompt_tokens']}"
        progress_line(f"missing: {each['arm']}, {where}: {each['fault'] or 'not come to'}")
    if missing:
        raise typer.Exit(1)


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
    emit_json(result) if as_json else show(kernel_table(result))


def _time_here(settings: dict[str, Any], table: DecodeTable, file: RecordFile) -> None:
    from outrider.backends import decode_timing

    work = decode_timing.DecodeWork(**settings, prompt_tokens=max(cell.prompt_tokens for cell in table.plan))
    planned = [decode_timing.Cell(**asdict(cell)) for cell in table.plan]

    def keep(found: dict[str, Any]) -> None:
        table.ours = [found]
        file.write(table.record(), missing=table.missing())

    with progress_bar(decode_timing.num_steps(work, planned)) as report:
        decode_timing.time_decoding(work, planned, progress=report, keep=keep)


def _time_both(
    settings: dict[str, Any],
    lists: dict[str, str | None],
    table: DecodeTable,
    file: RecordFile,
    *,
    site: Path | None,
    folder: Path,
    timeout_s: float,
) -> None:
    """Ours, the peer, ours again, each in a process of its own; parts and exactness are looked at once.

    There is no second pass of ours where there is nothing of the peer's between the two.
    """
    progress_line("ours, before the peer")
    _run_ours(_arguments(settings, lists), 0, table, file, folder)
    progress_line("the peer; a start takes minutes")
    longest = max(cell.prompt_tokens for cell in table.plan) + settings["max_tokens"] + 1
    work = {
        "max_tokens": settings["max_tokens"],
        "context_length": max(MIN_PEER_CONTEXT, settings["context_length"] or 0, longest),
        "runs": settings["num_runs"],
    }
    _run_peer(settings["target"], table, file, site=site, folder=folder, work=work, timeout_s=timeout_s)
    if table.peer:
        progress_line("ours, after the peer")
        again = {**settings, "num_traced_cycles": 0, "is_exactness_checked": False}
        _run_ours(_arguments(again, lists), 1, table, file, folder)


def _run_ours(arguments: list[str], number: int, table: DecodeTable, file: RecordFile, folder: Path) -> None:
    """A pass of ours into the table; one that is not the first may fail."""

    def keep(found: dict[str, Any]) -> None:
        table.ours[number:] = [found]
        file.write(table.record(), missing=table.missing())

    try:
        run_ours(arguments, folder / ("again.json" if number else "ours.json"), keep)
    except EngineFault as fault:
        if not number:
            raise
        progress_line(f"failed: {fault}")


def _run_peer(target: str, table: DecodeTable, file: RecordFile, **how: Any) -> None:
    """The peer into the table, a start for each draft length; where one fails the others go on."""

    def keep(found: dict[str, Any]) -> None:
        table.peer[cell_key(found)] = found
        file.write(table.record(), missing=table.missing())

    for length in sorted({cell.num_speculative_tokens for cell in table.plan}):
        cells = [cell for cell in table.plan if cell.num_speculative_tokens == length]
        try:
            run_peer(target, cells, keep=keep, **how)
        except EngineFault as fault:
            table.peer_faults |= {cell.key: str(fault) for cell in cells if cell.key not in table.peer}
            file.write(table.record(), missing=table.missing())


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


app.command()(bench_report.report)
