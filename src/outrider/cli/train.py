"""`outrider train`: let the target write text, fit a drafter to it, export the drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.output import emit_json, progress_line

app = typer.Typer(no_args_is_help=True, help="Train a drafter on text that the target writes itself.")

RecipeArgument = Annotated[list[Path], typer.Argument(help="Recipe files (recipes/*.toml).")]
TargetOption = Annotated[str | None, typer.Option(help="Target weights; the embedded default if left out.")]
DataOption = Annotated[Path, typer.Option(help="File that holds the generated text.")]
DeviceOption = Annotated[str, typer.Option(help="cuda or cpu.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command()
def generate(
    recipe: Annotated[Path, typer.Argument(help="A recipe file.")],
    data: DataOption,
    target: TargetOption = None,
    device: DeviceOption = "cuda",
    as_json: JsonOption = False,
) -> None:
    """Write the recipe's training text to --data."""
    import torch

    from outrider.training.config import load_recipe
    from outrider.training.pipeline import make_text
    from outrider.weights.locate import locate_target

    facts = make_text(
        locate_target(target), load_recipe(recipe), data, device=torch.device(device), progress=progress_line
    )
    emit_json(facts) if as_json else progress_line(json.dumps(facts))


@app.command()
def run(
    recipes: RecipeArgument,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Directory for the drafters, one folder a recipe.")],
    target: TargetOption = None,
    device: DeviceOption = "cuda",
    as_json: JsonOption = False,
) -> None:
    """Train one drafter a recipe, all on the same text, and export each with its record."""
    import torch

    from outrider.training.config import load_recipe
    from outrider.training.pipeline import train_drafters
    from outrider.weights.locate import locate_target

    loaded = [load_recipe(recipe) for recipe in recipes]
    records = train_drafters(
        locate_target(target), loaded, data, out, device=torch.device(device), progress=progress_line
    )
    held_out = {name: record["held_out"] for name, record in records.items()}
    emit_json(held_out) if as_json else progress_line(json.dumps(held_out))
