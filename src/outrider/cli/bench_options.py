"""What the commands of `outrider bench` that ask servers have in common: options, the key, figures in tables."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.errors import ConfigError

KEY_VARIABLE = "OUTRIDER_API_KEY"
OWN_FIELDS = {"model", "messages", "prompt", "max_tokens", "temperature", "stream", "stream_options", "tools"}

Url = Annotated[str, typer.Argument(help="Of a server that speaks OpenAI's API, such as http://127.0.0.1:8000.")]
_WORKLOADS = (
    "narrative, code, chat, tools, math, languages or long-context; demo for base models; or a JSONL file in "
    "OpenAI's (messages), ShareGPT's (conversations) or Spec-Bench's (turns) shape."
)
WorkloadName = Annotated[list[str] | None, typer.Option("--workload", "-w", help=_WORKLOADS)]
WorkloadText = Annotated[str, typer.Option("--workload", "-w", help=_WORKLOADS)]
Model = Annotated[str | None, typer.Option(help="As the server names it; the first it serves if left out.")]
ApiKey = Annotated[str | None, typer.Option(help=f"Bearer key; {KEY_VARIABLE} in the environment does the same.")]
Requests = Annotated[int, typer.Option("--num-requests", help="Requests that count, of each run.")]
Warmups = Annotated[
    int | None,
    typer.Option("--num-warmups", help="Requests before them; at least 4 and twice the concurrency if left out."),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of each answer.")]
Timeout = Annotated[float, typer.Option("--timeout-s", help="Seconds that an answer may keep silent.")]
Body = Annotated[list[str] | None, typer.Option("--body", help="A field of every request: NAME=JSON; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Write on to --max-tokens, as most servers can.")]
Record = Annotated[Path | None, typer.Option(help="Also write a record with raw rows to this new file.")]


def check_packages() -> None:
    """ConfigError where the packages that measuring needs are not installed."""
    missing = [name for name in ("httpx", "prometheus_client", "scipy") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed. Run: pip install 'outrider[bench]'.")


def body_fields(given: list[str] | None, *, ignore_eos: bool = False) -> dict[str, Any]:
    """Fields of a request's body from NAME=JSON; ConfigError names what is neither."""
    fields: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
    for each in given or []:
        name, has_value, text = each.partition("=")
        try:
            if not name or not has_value:
                raise ValueError
            fields[name] = json.loads(text)
        except ValueError:
            raise ConfigError(
                f"--body {each!r} is not NAME=JSON. Write it as speculative='{{\"enabled\": false}}' or top_p=0.9."
            ) from None
    if own := sorted(set(fields) & OWN_FIELDS):
        raise ConfigError(f"--body {own[0]}: this command sets it, by an option or because it must. Leave it out.")
    return fields


def server_key() -> str | None:
    """The key that the environment has for servers, if any."""
    return os.environ.get(KEY_VARIABLE)


def figure(value: float | None, factor: float = 1.0, *, digits: int = 1) -> str:
    """A figure in a table, a dash where there is none."""
    return "–" if value is None else f"{factor * value:.{digits}f}"


def percentage(value: float | None) -> str:
    """A share as per cent, a dash where there is none."""
    return "–" if value is None else f"{100 * value:.0f} %"
