"""Records: one JSON a run, raw rows and environment included. Tables in documents are made from these."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider import environment
from outrider.benchmarking.workloads import Workload

SCHEMA = 1


def make_record(
    name: str,
    *,
    workload: Workload,
    arms: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    summary: dict[str, Any] | Sequence[dict[str, Any]],
    machine: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Assemble a record (design §5) for a run of the current command line.

    `summary` is one object for one comparison, a list of them for a table; `machine` is the environment of the process
    that measured, where that was another one.
    """
    return {
        "schema": SCHEMA,
        "name": name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["outrider", *_without_key(sys.argv[1:])]),
        "environment": machine or environment.describe(),
        "workload": {"name": workload.name, "sha256": workload.sha256},
        "arms": list(arms),
        "rows": list(rows),
        "summary": summary if isinstance(summary, dict) else list(summary),
    }


def _without_key(arguments: Sequence[str]) -> list[str]:
    """A command line less the key that it gives a server, since records are published."""
    shown = ["--api-key=…" if argument.startswith("--api-key=") else argument for argument in arguments]
    return ["…" if before == "--api-key" else argument for before, argument in zip(["", *shown], shown, strict=False)]


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record; an existing file is kept, since records are append-only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
