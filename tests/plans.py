"""The name plans of public checkpoints at full size, and copies of them with something changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "golden" / "name_plans"
PLANS = sorted(path.name for path in FOLDER.iterdir())
TARGETS = [name for name in PLANS if name.startswith(("gemma-4", "Gemma-4")) and not name.endswith("DFlash")]


def plan_path(name: str) -> Path:
    """The directory of a plan."""
    return FOLDER / name


def changed_plan(
    name: str, folder: Path, *, tensors: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A copy of a plan whose `tensors` are set, or removed where they are None, and whose `config` has other values."""
    folder.mkdir()
    plan = json.loads((FOLDER / name / "tensors.json").read_text())
    merged = {**plan["tensors"], **(tensors or {})}
    plan["tensors"] = {pattern: entry for pattern, entry in merged.items() if entry is not None}
    (folder / "tensors.json").write_text(json.dumps(plan))
    declared = json.loads((FOLDER / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**declared, **(config or {})}))
    return folder
