"""`outrider train`: let the target write text, fit a drafter to it, export the drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.output import emit_json, progress_line, writable
from outrider.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Train a drafter on text that the target writes itself.")

RecipeArgument = Annotated[list[Path], typer.Argument(help="Recipe files (recipes/*.toml).")]
TargetOption = Annotated[str | None, typer.Option(help="Target weights; the embedded default if left out.")]
DataOption = Annotated[Path, typer.Option(help="File that holds the generated text.")]
CheckpointOption = Annotated[
    Path | None, typer.Option(help="File to keep the run in; training goes on from it if it exists.")
]
EveryOption = Annotated[int, typer.Option(help="Steps from one writing of --checkpoint to the next.")]
StopOption = Annotated[
    float | None, typer.Option(help="Seconds of training, then write --checkpoint, export the drafter so far and end.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command()
def generate(
    recipe: Annotated[Path, typer.Argument(help="A recipe file.")],
    data: DataOption,
    target: TargetOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write the recipe's training text to --data."""
    from outrider.backends.local import resolve_device
    from outrider.training.config import load_recipe
    from outrider.training.pipeline import make_text
    from outrider.weights.locate import locate_target

    loaded, place = load_recipe(recipe), resolve_device(device)
    facts = make_text(locate_target(target), loaded, writable("--data", data), device=place, progress=progress_line)
    emit_json(facts) if as_json else progress_line(json.dumps(facts))


@app.command()
def run(
    recipes: RecipeArgument,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Directory for the drafters, one folder a recipe.")],
    target: TargetOption = None,
    device: DeviceOption = "auto",
    checkpoint: CheckpointOption = None,
    checkpoint_every_steps: EveryOption = 500,
    stop_after_s: StopOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train one drafter a recipe, all on the same text, and export each with its record."""
    from outrider.backends.local import resolve_device
    from outrider.training.checkpoint import CheckpointOptions
    from outrider.training.config import load_recipe
    from outrider.training.pipeline import train_drafters
    from outrider.weights.locate import locate_target

    keeping = None
    if checkpoint is not None:
        writable("--checkpoint", checkpoint)
        keeping = CheckpointOptions(file=checkpoint, every_steps=checkpoint_every_steps, stop_after_s=stop_after_s)
    elif stop_after_s is not None:
        raise ConfigError("--stop-after-s leaves steps to be done. Say with --checkpoint FILE where to keep the run.")
    records = train_drafters(
        locate_target(target),
        [load_recipe(recipe) for recipe in recipes],
        data,
        writable("--out", out, is_directory=True),
        device=resolve_device(device),
        progress=progress_line,
        keeping=keeping,
    )
    kept = ("finished", "num_steps_done", "held_out")
    shown = {name: {key: record[key] for key in kept} for name, record in records.items()}
    emit_json(shown) if as_json else progress_line(json.dumps(shown))
