"""Conversations that the target is to take part in, read from JSONL and checked before anything is asked.

Answers in a file were written by someone else, so only their places count: the target answers there itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from outrider.errors import ConfigError

OnBadRow = Literal["stop", "drop"]
_MARKER = re.compile(r"<[^<>\s]{1,40}>|\[/?INST\]")
_FOREIGN_MARKERS = frozenset(
    (
        *("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|eot_id|>"),
        *("<|start_header_id|>", "<|endoftext|>", "[INST]", "[/INST]"),
    )
)
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
_SHAREGPT_ROLES |= {"observation": "tool", "function_response": "tool", "function_call": "call"}
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Turn:
    """One answer that is due: what is said before it, and how the conversation goes on."""

    given: tuple[dict[str, Any], ...]
    """OpenAI messages of system, user and tools since the answer before."""
    recorded_call: dict[str, Any] | None = None
    """The file's own tool call, whose results follow: the conversation goes on with it, whatever the target writes."""


@dataclass(frozen=True)
class Conversation:
    """One row of a file."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    domain: str | None = None
    language: str | None = None
    """As the row has them; None where it has none."""
    where: str = field(default="", compare=False)
    """File and line, for messages."""

    @cached_property
    def key(self) -> str:
        """SHA-256 of all that is given, spaces and letter case apart: equal for rows that ask the same."""
        calls = [(turn.recorded_call or {}).get("tool_calls") for turn in self.turns]
        asked = json.dumps([[turn.given for turn in self.turns], calls, self.tools], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(re.sub(r"(\s|\\[nt])+", " ", asked.casefold()).encode()).hexdigest()

    @property
    def question(self) -> str:
        """What the first user turn says."""
        given = (message for turn in self.turns for message in turn.given)
        return next((str(message["content"]) for message in given if message["role"] == "user"), "")


def read_conversations(
    paths: Sequence[Path], *, control_tokens: frozenset[str] = frozenset(), on_bad_row: OnBadRow = "stop"
) -> tuple[list[Conversation], Counter[str]]:
    """Every conversation of JSONL files, each once, and how many rows were dropped, by reason.

    A row is OpenAI's (`messages`, perhaps `tools`), ShareGPT's (`conversations` of `from` and `value`), Spec-Bench's
    (`turns`) or a `prompt`; `domain` (or `category`) and `language` are for the card. A row that would poison training
    is a ConfigError naming its line, or is dropped: no JSON, an empty assistant turn, turns out of order, text that
    spells one of `control_tokens` or another family's.
    """
    found: dict[str, Conversation] = {}
    dropped: Counter[str] = Counter()
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                read = read_row(line, where=where, control_tokens=control_tokens)
            except ValueError as error:
                if on_bad_row == "stop":
                    raise ConfigError(f"{where}: {error}. Correct or remove it, or give --drop-bad-rows.") from None
                dropped[reason_of(str(error))] += 1
                continue
            if read.key in found:
                dropped["repeated prompt"] += 1
            found.setdefault(read.key, read)
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: no conversation is left. Give JSONL with one a line.")
    return list(found.values()), dropped


def reason_of(message: str) -> str:
    """What bad rows are counted under: the message up to its first detail, without the number of a turn."""
    return "bad row: " + re.split(r"[:;,(]", re.sub(r"\bmessage \d+\b", "a message", message), maxsplit=1)[0].strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text ({error}). Give a JSONL file.") from error


def read_row(line: str, *, where: str = "", control_tokens: frozenset[str] = frozenset()) -> Conversation:
    """The conversation of one line; ValueError says what is wrong with it."""
    value = json.loads(line)
    reader = next((_SHAPES[key] for key in _SHAPES if isinstance(value, dict) and key in value), None)
    if reader is None:
        raise ValueError(f"a row has one of {', '.join(_SHAPES)}, and this one has none")
    try:
        messages, tools = reader(value), value.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("tools are a list of objects")
        turns = _turns(messages)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a message is not as its format has it ({type(error).__name__}: {error})") from None
    _check_markers(messages, control_tokens)
    domain, language = value.get("domain") or value.get("category"), value.get("language")
    return Conversation(turns, tuple(tools), _label(domain), _label(language), where)


def _label(value: object) -> str | None:
    return value.strip().lower() or None if isinstance(value, str) else None


def _from_openai(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**message, "content": _text(message.get("content"))} for message in value["messages"]]


def _from_sharegpt(value: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    call_id = ""
    for number, turn in enumerate(value["conversations"]):
        role, text = _SHAREGPT_ROLES.get(turn["from"], turn["from"]), turn["value"]
        if role == "call":
            call, call_id = json.loads(text), f"call_{number}"
            arguments = call["arguments"] if isinstance(call["arguments"], str) else json.dumps(call["arguments"])
            function = {"name": call["name"], "arguments": arguments}
            called = [{"id": call_id, "type": "function", "function": function}]
            messages.append({"role": "assistant", "content": None, "tool_calls": called})
        elif role == "tool":
            messages.append({"role": "tool", "content": _text(text), "tool_call_id": call_id})
        else:
            messages.append({"role": role, "content": _text(text)})
    return messages


def _from_turns(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": _text(text)} for text in value["turns"]]


def _from_prompt(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": _text(value["prompt"])}]


_SHAPES: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "messages": _from_openai,
    "conversations": _from_sharegpt,
    "turns": _from_turns,
    "prompt": _from_prompt,
}


def _text(content: object) -> str | None:
    """The text of a message, its parts joined; None where there is none."""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("a message has parts that are not text")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"a message's content is text, not {content!r:.40}")
    return content


def _turns(messages: list[dict[str, Any]]) -> tuple[Turn, ...]:
    """Answers due: where the file has an assistant's turn, between two questions, and after the last."""
    turns: list[Turn] = []
    given: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        role, before = message["role"], given[-1]["role"] if given else None
        calls = message.get("tool_calls") or []
        _check_role(role, number, is_first=not turns and not given)
        if role == "assistant":
            if not calls and not (message["content"] or "").strip():
                raise ValueError(f"message {number} is an empty assistant turn: whoever wrote it lost the answer")
            if before is None or before == "system":
                raise ValueError(f"message {number}: an assistant speaks, but nobody has asked")
            turns.append(Turn(tuple(given), message if calls else None))
            given = []
            continue
        if role == "tool" and before != "tool" and not (not given and turns and turns[-1].recorded_call):
            raise ValueError(f"message {number} is a tool's result, but no call comes before it")
        if role != "tool" and not (message["content"] or "").strip():
            raise ValueError(f"message {number} of {role} is empty")
        if role == "user" and not given and turns and turns[-1].recorded_call:
            raise ValueError(f"message {number}: the call before it has no result")
        if role == "user" and before in ("user", "tool"):
            turns.append(Turn(tuple(given)))
            given = []
        given.append(message)
    if given and given[-1]["role"] in ("user", "tool"):
        turns.append(Turn(tuple(given)))
    if not turns:
        raise ValueError("nobody asks anything")
    return tuple(turns)


def _check_role(role: object, number: int, *, is_first: bool) -> None:
    if role not in _ROLES:
        raise ValueError(f"message {number} is from {role!r}; known are {', '.join(_ROLES)}")
    if role in ("system", "developer") and not is_first:
        raise ValueError(f"message {number} is a system message, and only the first can be one")


def _check_markers(messages: list[dict[str, Any]], control_tokens: frozenset[str]) -> None:
    """Text that spells turns was rendered with a template once; rendering it again would nest two."""
    for number, message in enumerate(messages):
        spelled = {*_MARKER.findall(message["content"] or "")} & (control_tokens | _FOREIGN_MARKERS)
        if spelled:
            raise ValueError(
                f"message {number} spells {min(spelled)}, so a chat template was applied to it already, the target's "
                "or another's. Plain messages are needed"
            )
