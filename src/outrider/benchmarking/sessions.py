"""Agent sessions for long runs: conversations whose context grows by tool results, alike in all runs but for a salt.

Shapes and sizes follow what people soak their servers with: 20 fresh sessions of five turns, or five that grow to some
25,000 tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest
from outrider.errors import ConfigError

TOOL = "read_file"
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Read a text file of the project.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    },
)
SYSTEM = "You are a careful assistant in a software project. Answer briefly and to the point. Session {salt}."
_WORDS = [
    "accepted",
    "anchor",
    "answer",
    "batch",
    "block",
    "boundary",
    "build",
    "cache",
    "check",
    "client",
    "clock",
    "column",
    "commit",
    "context",
    "counter",
    "cycle",
    "decode",
    "device",
    "draft",
    "error",
    "field",
    "file",
    "filter",
    "graph",
    "header",
    "index",
    "kernel",
    "layer",
    "length",
    "limit",
    "logits",
    "mask",
    "memory",
    "model",
    "number",
    "offset",
    "output",
    "page",
    "position",
    "prefix",
    "prompt",
    "queue",
    "ready",
    "record",
    "request",
    "result",
    "row",
    "sample",
    "seat",
    "server",
    "session",
    "shape",
    "slot",
    "stream",
    "table",
    "target",
    "test",
    "thread",
    "token",
    "update",
    "value",
    "vector",
    "version",
    "window",
    "worker",
]


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    kind: str
    text: str
    max_tokens: int
    num_result_characters: int = 0
    """Size of the tool result that comes with it; 0 is none."""


@dataclass(frozen=True)
class Shape:
    """How many sessions, and the turns of each."""

    name: str
    num_sessions: int
    turns: tuple[Turn, ...]

    def scaled(self, scale: float) -> Shape:
        """The same with tool results of `scale` times the size, for servers with little context."""
        if not 0 < scale <= 10:
            raise ConfigError(f"--scale {scale:g} is not above 0 and at most 10. Tool results are that much larger.")
        return replace(self, turns=tuple(_scaled(turn, scale) for turn in self.turns))


_FRESH_TURNS = (
    Turn("checklist", "Write a checklist of ten steps for releasing a new version of a small library.", 256),
    Turn("tool use", "Which file would you read first to find out how the project is built? Read it.", 128),
    Turn("tool result", "Summarise what the file says in five sentences.", 256, 12_000),
    Turn("code", "Write a Python function that parses one line of that file into a dictionary, with a docstring.", 384),
    Turn("reasoning", "Three workers share a queue of 100 jobs; each job takes 2, 3 or 5 s by turns. How long do they "
         "need at least? Explain step by step.", 384),
)  # fmt: skip
_CONTINUOUS_TURNS = (
    Turn("plan", "Make a plan in five points for finding out why a server slows down after an hour.", 256),
    Turn("first log", "Here is the first log. Name the three words that seem to matter most.", 256, 20_000),
    Turn("second log", "Compare the second log with the first.", 256, 24_000),
    Turn("third log", "Write a Python function that counts the words of such a log.", 384, 24_000),
    Turn("last log", "Sum up what we know, and say what to look at next.", 384, 32_000),
)
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("fresh", 20, _FRESH_TURNS),
        Shape("continuous", 5, _CONTINUOUS_TURNS),
        Shape("quick", 8, _FRESH_TURNS),
    )
}


def find_shape(name: str) -> Shape:
    """A shape by name; ConfigError where there is none."""
    if name not in SHAPES:
        raise ConfigError(f"--shape {name!r} is not known. Choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]


class Conversation:
    """One session as it grows: ask for the next request, and give it the answer."""

    def __init__(self, turns: tuple[Turn, ...], salt: str, *, has_tools: bool) -> None:
        """A `salt` of its own keeps a session from being found in the prefix cache of another."""
        self._turns, self._salt, self._has_tools = turns, salt, has_tools
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM.format(salt=salt)}]

    def requests(self) -> Iterator[tuple[Turn, ChatRequest]]:
        """The turns in order; `answered` is to be called after each."""
        for number, turn in enumerate(self._turns):
            self._ask(turn, number)
            tools = TOOLS if self._has_tools else ()
            yield turn, ChatRequest(messages=tuple(self._messages), max_tokens=turn.max_tokens, tools=tools)

    def answered(self, sample: Sample) -> None:
        """Put an answer into the context, with a short result for each tool that it called."""
        if not sample.tool_calls or not self._has_tools:
            self._messages.append({"role": "assistant", "content": sample.text or "(no answer)"})
            return
        ids = [call.get("id") or f"call_{len(self._messages)}_{at}" for at, call in enumerate(sample.tool_calls)]
        calls = [
            _call(found, call["name"], call["arguments"]) for found, call in zip(ids, sample.tool_calls, strict=True)
        ]
        self._messages.append({"role": "assistant", "content": sample.text, "tool_calls": calls})
        for found in ids:
            self._messages.append({"role": "tool", "tool_call_id": found, "content": "The file is empty."})

    def _ask(self, turn: Turn, number: int) -> None:
        if not turn.num_result_characters:
            self._messages.append({"role": "user", "content": turn.text})
            return
        result = made_up_log(turn.num_result_characters, f"{self._salt}/{number}")
        if not self._has_tools:
            self._messages.append({"role": "user", "content": f"{result}\n\n{turn.text}"})
            return
        path, found = f"logs/{number}.txt", f"call_{number}"
        self._messages += [
            {"role": "user", "content": turn.text},
            {"role": "assistant", "content": "", "tool_calls": [_call(found, TOOL, json.dumps({"path": path}))]},
            {"role": "tool", "tool_call_id": found, "content": result},
        ]


def made_up_log(num_characters: int, salt: str) -> str:
    """Lines of a log that never was: exactly so many characters, the same for the same salt."""
    draw = random.Random(salt)
    lines, length = list[str](), 0
    while length < num_characters:
        clock = f"{draw.randrange(24):02}:{draw.randrange(60):02}:{draw.randrange(60):02}"
        line = f"{clock} {draw.choice(_WORDS)}={draw.randrange(10_000)} {' '.join(draw.choices(_WORDS, k=8))}"
        lines.append(line)
        length += len(line) + 1
    return "\n".join(lines)[:num_characters]


def _scaled(turn: Turn, scale: float) -> Turn:
    num_characters = round(turn.num_result_characters * scale)
    return replace(turn, num_result_characters=num_characters or min(1, turn.num_result_characters))


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
