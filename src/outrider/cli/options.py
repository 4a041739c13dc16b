"""Options that several commands share, each written once."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.errors import ConfigError

Target = Annotated[
    str | None, typer.Option(help="A GGUF file, a directory, a hub's owner/name, or 'embedded', the default.")
]
Drafter = Annotated[
    str, typer.Option(help="A directory or a hub's owner/name; 'auto' is the one shipped for the embedded default.")
]
DrafterQuantization = Annotated[
    str | None,
    typer.Option(help="int8 or int4: round the drafter while it is loaded; the text stays the same."),
]
NoDrafter = Annotated[bool, typer.Option("--no-drafter", help="Decode plainly.")]
DraftLength = Annotated[
    int | None, typer.Option("--num-speculative-tokens", "-n", help="Draft length; the drafter's own if left out.")
]
Kernels = Annotated[str, typer.Option(help="auto, cpu (compiled) or torch (plain products).")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
SyntheticLength = Annotated[
    float | None,
    typer.Option("--synthetic-acceptance-length", help="For timing: tokens a cycle is worth; no real text."),
]
SyntheticRates = Annotated[
    str | None,
    typer.Option("--synthetic-acceptance-rates", help="For timing: share of cycles that keep each draft, as 0.9,0.7,…"),
]
ContextLength = Annotated[int, typer.Option(help="Most tokens of prompt and answer together.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that reach this probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens with this share of the likeliest one's probability.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, everything else on stderr.")]


def parsed_rates(text: str | None) -> tuple[float, ...] | None:
    """The numbers of `--synthetic-acceptance-rates`."""
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(
            f"--synthetic-acceptance-rates {text!r} is not a list of numbers with commas between, such as 0.9,0.7."
        ) from None
