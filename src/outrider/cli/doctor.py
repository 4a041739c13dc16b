"""`outrider doctor`: what this machine has, what would load, and whether target and drafter fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import typer
from rich.table import Table

from outrider import environment
from outrider.cli import options
from outrider.cli.output import emit_json, progress_line, show
from outrider.errors import OutriderError


def doctor(
    target: options.Target = None,
    drafter: options.Drafter = "auto",
    kernels: options.Kernels = "auto",
    device: options.Device = "auto",
    context_length: options.ContextLength = 8192,
    as_json: options.Json = False,
) -> None:
    """Check the machine, the target and the drafter without reading their weights: what loads, fits, and takes memory.

    Then draft a few tokens, where there are weights and the target is small. Both may also be name plans.
    """
    from outrider.backends import inspection

    found: dict[str, Any] = {"environment": environment.describe(), "checks": []}
    is_sound = True
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "kernels": lambda: inspection.inspect_kernels(kernels, device),
        "target": lambda: inspection.inspect_target(target, context_length=context_length, progress=progress_line),
        "drafter": lambda: inspection.inspect_drafter(
            drafter, target=target, context_length=context_length, progress=progress_line
        ),
        "drafting": lambda: inspection.probe_drafting(target, drafter=drafter, kernels=kernels, device=device),
    }
    for name, step in steps.items():
        if name == "drafting" and not is_sound:
            found["checks"].append({"name": name, "ok": False, "not_probed": "not checked: see the problems above"})
            continue
        try:
            found["checks"].append({"name": name, "ok": True, **step()})
        except OutriderError as error:
            is_sound = False
            found["checks"].append({"name": name, "ok": False, "problem": str(error)})
    found["ok"] = is_sound
    emit_json(found) if as_json else _show(found)
    if not is_sound:
        raise typer.Exit(2)


def _show(found: dict[str, Any]) -> None:
    table = Table(title="outrider doctor", show_lines=True)
    for column in ("check", "", "found"):
        table.add_column(column)
    machine = found["environment"]
    table.add_row("machine", "ok", _machine(machine))
    for check in found["checks"]:
        facts = {key: value for key, value in check.items() if key not in ("name", "ok")}
        text = "\n".join(f"{key}: {_shortened(key, value)}" for key, value in facts.items())
        mark = "–" if "not_probed" in check else "ok" if check["ok"] else "PROBLEM"
        table.add_row(check["name"], mark, text)
    show(table)


def _machine(machine: dict[str, Any]) -> str:
    """Cores, memory and GPUs, to hold against what models take."""
    memory = f", {_size(machine['memory_bytes'])} of memory" if machine["memory_bytes"] else ""
    gpus = [f"{gpu['name']} with {_size(gpu['memory_bytes'])}" for gpu in machine["accelerators"]]
    return "\n".join([f"{machine['cpu_model']}, {machine['num_usable_cores']} cores{memory}", *gpus])


def _shortened(key: str, value: Any) -> str:
    """Two decimals and twelve digits of a checksum are enough for reading; --json has all."""
    if "_bytes" in key:
        return _size(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} ({number})" for name, number in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:.12}…" if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else str(value)


def _size(num_bytes: int) -> str:
    """In the largest unit that leaves at least one of it."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.2f} {unit}"
    return f"{num_bytes} bytes"
