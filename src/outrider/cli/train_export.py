"""`outrider train export`: a drafter in a layout that others read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.output import emit_json, progress_line


def export(
    drafter: Annotated[str, typer.Argument(help="A directory, a hub's owner/name, or 'auto', the shipped one.")],
    layout: Annotated[str, typer.Option(help="outrider, z-lab, deepspec, speculators or vllm (stock).")],
    out: Annotated[Path, typer.Option(help="New directory for config.json and model.safetensors.")],
    target: Annotated[
        str | None, typer.Option(help="Target weights; for layouts whose files bring its tables.")
    ] = None,
    target_name: Annotated[str | None, typer.Option(help="What others know the target by: a hub's owner/name.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; as they are if left out.")] = None,
    as_json: options.Json = False,
) -> None:
    """Write a drafter in another layout: the same numbers, the same drafts, the names and keys of those who read it.

    What the layout cannot say is refused before anything is written; the files are there whole or not at all.
    """
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
        ),
    )
    if as_json:
        emit_json({"drafter": str(out), **asdict(made)})
        return
    borrowed = f"; its reader takes {' and '.join(made.borrowed)} of the target" if made.borrowed else ""
    progress_line(f"{out}: {made.num_tensors} tensors, {made.num_bytes / 1e6:.1f} MB in layout {layout}{borrowed}")
