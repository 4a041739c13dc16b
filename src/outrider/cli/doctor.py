"""`outrider doctor`: what this machine has, what would load, and whether target and drafter fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from rich.table import Table

from outrider import environment
from outrider.cli import options
from outrider.cli.output import console, emit_json, progress_line
from outrider.errors import OutriderError


def doctor(
    target: options.Target = None,
    drafter: options.Drafter = "auto",
    kernels: options.Kernels = "auto",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Check the machine, the target and the drafter, and draft a few tokens to see that drafting works."""
    from outrider.backends import inspection

    found: dict[str, Any] = {"environment": environment.describe(), "checks": []}
    is_sound = True
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "kernels": lambda: inspection.inspect_kernels(kernels, device),
        "target": lambda: inspection.inspect_target(target, progress=progress_line),
        "drafter": lambda: inspection.inspect_drafter(drafter, is_embedded=target is None),
        "drafting": lambda: inspection.probe_drafting(target, drafter=drafter, kernels=kernels, device=device),
    }
    for name, step in steps.items():
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
    table.add_row("machine", "ok", f"{machine['cpu_model']}, {machine['num_usable_cores']} cores")
    for check in found["checks"]:
        facts = {key: value for key, value in check.items() if key not in ("name", "ok")}
        text = "\n".join(f"{key}: {value}" for key, value in facts.items())
        table.add_row(check["name"], "ok" if check["ok"] else "PROBLEM", text)
    console.print(table)
