"""`outrider explain`: what would take the memory of a GPU, part by part."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.backends.dummy_configs import DUMMY_NAMES
from outrider.cli import options
from outrider.cli.output import emit_json, progress_line, show
from outrider.errors import ConfigError

GIB = 1 << 30


def explain(
    target: Annotated[
        str | None,
        typer.Option(
            help=f"A directory, a hub's owner/name, or one of {', '.join(DUMMY_NAMES)} by its public dimensions."
        ),
    ] = None,
    drafter: options.Drafter = "auto",
    drafter_quantization: options.DrafterQuantization = None,
    no_drafter: options.NoDrafter = False,
    gpu_memory_gib: Annotated[
        float | None, typer.Option(help="Memory of the GPU; that of the first one here if left out.")
    ] = None,
    context_length: options.ContextLength = 8192,
    max_seats: Annotated[int, typer.Option(help="Requests decoded at the same time.")] = 1,
    as_json: options.Json = False,
) -> None:
    """Say where memory goes: weights by kind, drafter, caches by group, passes and reserve. Reads no weights.

    Exit code 1 where it does not fit.
    """
    from outrider.backends.explain import explain_memory
    from outrider.engine.engine import EngineConfig

    found = explain_memory(
        target,
        drafter=None if no_drafter else drafter,
        drafter_quantization=drafter_quantization,
        config=EngineConfig(context_length=context_length, max_seats=max_seats),
        gpu_memory_bytes=_gpu_memory_bytes(gpu_memory_gib),
        progress=progress_line,
    )
    emit_json(found) if as_json else show(_table(found))
    if not found["fits"]:
        raise typer.Exit(1)


def _gpu_memory_bytes(asked_gib: float | None) -> int:
    if asked_gib is not None and asked_gib > 0:
        return int(asked_gib * GIB)
    from outrider import environment

    gpus = environment.accelerators()
    if asked_gib is not None or not gpus:
        raise ConfigError("there is no GPU here to explain for. Give --gpu-memory-gib, a number above 0.")
    return int(gpus[0]["memory_bytes"])


def _table(found: dict[str, Any]) -> Table:
    drafter = f" and {found['drafter']}" if found["drafter"] else ""
    seats = f"{found['max_seats']} requests of {found['context_length']} tokens"
    table = Table(title=f"{found['target']}{drafter}: {seats} in bfloat16")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    for owner, parts in found["parts"].items():
        for name, num_bytes in parts.items():
            table.add_row(f"{owner}: {name}", _gib(num_bytes))
    table.add_section()
    for key in ("allocated", "logits", "pass", "graphs", "reserve", "left_over", "gpu_memory"):
        table.add_row(_WORDS[key], _gib(found[f"{key}_bytes"]))
    table.add_row("fits", "yes" if found["fits"] else "NO")
    return table


_WORDS = {
    "allocated": "weights and caches",
    "logits": "logits of a cycle",
    "pass": "the largest pass",
    "graphs": "graphs of greedy cycles",
    "reserve": "reserve: loaded kernels, other programs",
    "left_over": "left over",
    "gpu_memory": "memory of the GPU",
}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f}"
