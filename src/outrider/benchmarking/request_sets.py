"""What a benchmark asks: sets of requests, named and hashed, shipped here or read from a JSONL file of the user's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.benchmarking.prompt_length import log_entries
from outrider.benchmarking.workloads import WORKLOADS, Workload
from outrider.errors import ConfigError

_PROMPTS_DIR = Path(__file__).parent / "prompts"
_FROM_FILES = ("narrative", "code", "chat", "tools", "math", "languages")
LONG_CONTEXT = "long-context"
SHIPPED = (*_FROM_FILES, LONG_CONTEXT)
_LONG_ENTRIES = 130  # about 4,000 tokens
_SHAREGPT_ROLES = {"human": "user", "user": "user", "system": "system"}


@dataclass(frozen=True)
class Item:
    """One thing to ask: messages of a chat, or a text to go on with."""

    messages: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    """The file's own limit, which goes before the command's."""

    def salted(self, salt: str) -> Item:
        """The item with a few characters of its own at the very start, so that no cached prefix fits it (T-063)."""
        if self.prompt is not None:
            return replace(self, prompt=f"{salt}\n{self.prompt}")
        first, *rest = self.messages
        return replace(self, messages=({**first, "content": f"{salt}\n{first['content']}"}, *rest))


@dataclass(frozen=True)
class RequestSet:
    """Items under a name."""

    name: str
    items: tuple[Item, ...]

    @cached_property
    def workload(self) -> Workload:
        """Name and hash for a record: over the items as canonical JSON, or over bare prompts."""
        return Workload(
            self.name, tuple(each.prompt if each.prompt is not None else _canonical(each) for each in self.items)
        )


def load_request_set(name: str) -> RequestSet:
    """A shipped set by its name, or a JSONL file by its path; ConfigError names the line that is no request.

    Lines are OpenAI's (`messages`, with `tools` and `max_tokens` if wanted), ShareGPT's (`conversations`, of which the
    first human turn is asked, as vLLM does) or Spec-Bench's (`turns`, of which the first is asked).
    """
    if name == LONG_CONTEXT:
        return RequestSet(name, tuple(_long_item(number) for number in range(16)))
    if name in WORKLOADS:
        return RequestSet(name, tuple(Item(prompt=prompt) for prompt in WORKLOADS[name].prompts))
    path = _PROMPTS_DIR / f"{name}.jsonl" if name in _FROM_FILES else Path(name)
    if not path.is_file():
        raise ConfigError(f"--workload {name!r} is no file and none of {', '.join((*SHIPPED, *WORKLOADS))}.")
    lines = read_lines(path, "--workload")
    items = tuple(_item(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip())
    if not items:
        raise ConfigError(f"{path} has no lines. Give a JSONL file with a request a line.")
    return RequestSet(path.stem, items)


def read_lines(path: Path, option: str) -> list[str]:
    """Lines of a JSONL file, which LF ends and nothing else: texts inside may hold other line separators, raw.

    ConfigError for a file that cannot be read or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}. Name a JSONL file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path} is no text in UTF-8 ({error}). Name a JSONL file.") from None


def _item(line: str, where: str) -> Item:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}). Each line is one JSON object.") from None
    reader = next((_SHAPES[key] for key in _SHAPES if isinstance(value, dict) and key in value), None)
    if reader is None:
        raise ConfigError(f"{where}: has none of {', '.join(_SHAPES)}, so it is no request of a shape we know.")
    try:
        return reader(value)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{where}: {error}. See `outrider bench run --help` for the shapes.") from None


def _from_openai(value: dict[str, Any]) -> Item:
    messages = list(value["messages"])
    while messages and messages[-1]["role"] == "assistant":  # the answer is what we ask for
        messages.pop()
    for each in messages:
        if not isinstance(each["role"], str) or not isinstance(each.get("content"), str | None):
            raise ValueError("a message needs a role and text as its content")
    if not messages or not isinstance(messages[0].get("content"), str):
        raise ValueError("messages have nothing to answer")
    max_tokens = value.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"max_tokens {max_tokens!r} is not a whole number of at least 1")
    tools = value.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise ValueError("tools must be a list of objects")
    return Item(messages=tuple(messages), tools=tuple(tools), max_tokens=max_tokens)


def _from_sharegpt(value: dict[str, Any]) -> Item:
    messages = []
    for turn in value["conversations"]:
        role = _SHAREGPT_ROLES.get(turn["from"])
        if role is None or not isinstance(turn["value"], str):
            raise ValueError(f"a turn from {turn['from']!r} comes before any human turn with text")
        messages.append({"role": role, "content": turn["value"]})
        if role == "user":
            return Item(messages=tuple(messages))
    raise ValueError("conversations have no human turn")


def _from_spec_bench(value: dict[str, Any]) -> Item:
    turns = value["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ValueError("turns must be texts, in a list")
    first = turns[0]
    return Item(messages=({"role": "user", "content": first},))


_SHAPES: dict[str, Callable[[dict[str, Any]], Item]] = {
    "messages": _from_openai,
    "conversations": _from_sharegpt,
    "turns": _from_spec_bench,
}


def _long_item(number: int) -> Item:
    entry = 5 + 7 * number
    text = (
        f"Here is the log of a lock keeper.\n\n{log_entries(_LONG_ENTRIES, seed=1000 + number)}\n\n"
        f"First quote entry {entry} in full. Then summarise in a paragraph what the log says about cargoes and weather."
    )
    return Item(messages=({"role": "user", "content": text},))


def _canonical(item: Item) -> str:
    value = {"messages": item.messages, "tools": item.tools, "max_tokens": item.max_tokens}
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
