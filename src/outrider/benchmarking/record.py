"""Records: one JSON a run, raw rows and environment included. Tables in documents are made from these."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider import environment
from outrider.benchmarking.workloads import Workload

SCHEMA = 1
STOPPED = "stopped"
"""The verdict of a run that was stopped."""


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
    """Write a whole record; an existing file is kept, since records are append-only."""
    RecordFile(path).write(record)


class RecordFile:
    """The new file of a record that is written again whenever more is found, so that a run that is stopped keeps it.

    Until nothing is missing the record says `complete: false`, and under `missing` an object for each thing that is, or
    for `num_rows` of an arm. One of a run that was stopped has the cause under `stopped`, and claims nothing.
    """

    def __init__(self, path: Path | None) -> None:
        """Nothing is written before `write` is called; None keeps nothing."""
        self._path = path
        self._kept = ""

    def write(
        self, record: dict[str, Any], *, missing: Sequence[dict[str, Any]] = (), stopped: str | None = None
    ) -> None:
        """Put the record in the place of the one before it, whole at any time; FileExistsError for a file of others."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._kept:
            self._path.open("x").close()
        temporary = self._path.with_name(f"{self._path.name}.part")
        with temporary.open("w") as file:
            json.dump(_incomplete(record, missing, stopped) if missing or stopped else record, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        rows = f"{len(record['rows'])} row{'' if len(record['rows']) == 1 else 's'}"
        self._kept = f"{self._path} has {rows}" + (f", {num_missing(missing)} missing" if missing else "")

    @property
    def kept(self) -> str:
        """What a run that ends now leaves behind, in words."""
        if self._path is None:
            return "nothing was kept; --record FILE keeps what is finished"
        return self._kept or f"nothing was finished, so there is no {self._path}"


def num_missing(missing: Sequence[dict[str, Any]]) -> int:
    """How many rows a record's `missing` stands for."""
    return sum(each.get("num_rows", 1) for each in missing)


def _incomplete(record: dict[str, Any], missing: Sequence[dict[str, Any]], stopped: str | None) -> dict[str, Any]:
    marked = {**record, "complete": False, "missing": list(missing)}
    if stopped is None:
        return marked
    summary = record["summary"]
    unclaimed = [_unclaimed(each, stopped) for each in (summary if isinstance(summary, list) else [summary])]
    return {**marked, "stopped": stopped, "summary": unclaimed if isinstance(summary, list) else unclaimed[0]}


def _unclaimed(summary: dict[str, Any], stopped: str) -> dict[str, Any]:
    """The same figures, without a verdict: a run that ends when it looks well would prove anything."""
    text = f"the run was stopped ({stopped}), so nothing is claimed"
    claims = {"verdict": STOPPED, "verdict_text": text, "drafter_loses": False}
    return {**summary, **{name: value for name, value in claims.items() if name in summary}}
