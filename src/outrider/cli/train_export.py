"""`outrider train export`: a drafter in a layout that others read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.output import emit_json, progress_line
from outrider.cli.train_select import NAME as SELECTION
from outrider.errors import ConfigError


def export(
    drafter: Annotated[str, typer.Argument(help="A directory, a hub's owner/name, or 'auto', the shipped one.")],
    layout: Annotated[str, typer.Option(help="outrider, z-lab, deepspec, speculators or vllm (stock).")],
    out: Annotated[Path, typer.Option(help="New directory for config.json and model.safetensors.")],
    target: Annotated[
        str | None, typer.Option(help="Target weights; for layouts whose files bring its tables.")
    ] = None,
    target_name: Annotated[str | None, typer.Option(help="What others know the target by: a hub's owner/name.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; as they are if left out.")] = None,
    licence: Annotated[str | None, typer.Option(help="For the card, as the hub spells it: gemma, apache-2.0.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="A record of `train select` that measured this drafter, for the card.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write a drafter in another layout: the same numbers, the same drafts, the names and keys of those who read it.

    A model card, README.md, says what the config, --record and the training record beside the drafter say, no more.
    What the layout cannot say is refused before anything is written; the files are there whole or not at all.
    """
    selection = None if record is None else _selection(record)
    from outrider.training.convert import ConvertOptions, convert_drafter
    from outrider.weights.locate import embedded_drafter, locate_drafter, locate_target

    made = convert_drafter(
        embedded_drafter() if drafter == "auto" else locate_drafter(drafter),
        out,
        ConvertOptions(
            layout=layout,
            target=None if target is None else locate_target(target),
            target_name=target_name,
            dtype=dtype,
            licence=licence,
            selection=selection,
        ),
    )
    if as_json:
        emit_json({"drafter": str(out), **asdict(made)})
        return
    borrowed = f"; its reader takes {' and '.join(made.borrowed)} of the target" if made.borrowed else ""
    progress_line(f"{out}: {made.num_tensors} tensors, {made.num_bytes / 1e6:.1f} MB in layout {layout}{borrowed}")


def _selection(path: Path) -> dict[str, Any]:
    """The record, checked for its kind."""
    from outrider.benchmarking.report.records import read_record

    found = read_record(path).fields
    if found["name"] != SELECTION:
        raise ConfigError(f"--record {path} is of {found['name']}. Give one that `train select --record` wrote.")
    if found.get("complete") is False:
        raise ConfigError(f"--record {path} is of a run that was stopped. Run `train select` to its end.")
    return found
