"""A training run on disk: written whole or not at all, and continued only with the recipes and text it is made of."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider import environment
from outrider.errors import ConfigError
from outrider.training.files import write_whole
from outrider.training.loop import TrainingRun

SCHEMA = 1
MAX_DIFFERENCES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Where a run is kept, how often, and how long one call trains."""

    file: Path
    every_steps: int
    stop_after_s: float | None = None  # None: to the last step

    def __post_init__(self) -> None:
        if self.every_steps < 1 or not (self.stop_after_s or 0.0) >= 0.0:
            raise ConfigError(
                f"every_steps={self.every_steps}, stop_after_s={self.stop_after_s}: at least 1 step and 0 s, please."
            )


def write_checkpoint(path: Path, run: TrainingRun, *, text: dict[str, Any]) -> None:
    """Save all that continuing needs; `text` is what the text's file says of itself. The old file stays till the end.

    Holds float32 weights, the state of optimisers and schedules, counts, log rows and the environment.
    """
    state = {
        "schema": SCHEMA,
        "made_of": _made_of(run, text),
        "num_steps_done": run.num_steps_done,
        "seconds": run.seconds,
        "logs": run.logs,
        "trainers": {name: trainer.state_dict() for name, trainer in run.trainers.items()},
        "environment": environment.describe(),
    }
    write_whole(path, lambda file: torch.save(state, file), what="checkpoint")


def resume(path: Path, run: TrainingRun, *, text: dict[str, Any]) -> None:
    """Bring a fresh run to where the checkpoint's was; ConfigError if that one had other recipes or other text."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        schema, made_of = state["schema"], state["made_of"]
    except (OSError, RuntimeError, EOFError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"checkpoint {path} is damaged or something else ({error}). Remove it to begin anew."
        ) from error
    if schema != SCHEMA:
        raise ConfigError(
            f"checkpoint {path} has schema {schema}, this version reads {SCHEMA}. Remove it to begin anew."
        )
    differences = list(_differences(made_of, _made_of(run, text)))
    if differences:
        raise ConfigError(
            f"checkpoint {path} is of another run: {'; '.join(differences[:MAX_DIFFERENCES_SHOWN])}. "
            "Use the recipes and the text it was made of, or name another checkpoint to begin anew."
        )
    for name, trainer in run.trainers.items():
        trainer.load_state_dict(state["trainers"][name])
    run.num_steps_done, run.seconds, run.logs = state["num_steps_done"], state["seconds"], state["logs"]


def _made_of(run: TrainingRun, text: dict[str, Any]) -> dict[str, Any]:
    return {"recipes": {name: asdict(trainer.recipe) for name, trainer in run.trainers.items()}, "text": text}


def _differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted({**there, **here}):
        if key not in there or key not in here:
            yield f"{prefix}{key} is only {'here' if key in here else 'there'}"
        elif isinstance(there[key], dict) and isinstance(here[key], dict):
            yield from _differences(there[key], here[key], f"{prefix}{key}.")
        elif there[key] != here[key]:
            yield f"{prefix}{key} is {there[key]!r} there, {here[key]!r} here"
