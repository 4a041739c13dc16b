"""What a chat request says, checked: messages, tool calls and tools of the OpenAI API as plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant message of the history made."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One message; its text parts are joined."""

    role: str
    """'system' (also for OpenAI's 'developer'), 'user', 'assistant' or 'tool'."""
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_name: str = ""
    """The function that a tool message answers for."""
    tool_call_id: str = ""


@dataclass(frozen=True)
class Tool:
    """A function that may be called."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of an object."""


@dataclass(frozen=True)
class Rendered:
    """A chat as one text, begin token spelled out."""

    text: str
    boundaries: tuple[int, ...]
    """Where a text with the same beginning is likely to part: ends of the system turn and of user turns, in
    characters."""


def read_messages(raw: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Messages of a request; RequestError names the one that is wrong."""
    if not raw:
        raise RequestError("messages is empty. Give at least one message.")
    messages: list[Message] = []
    for index, each in enumerate(raw):
        messages.append(_read_message(each, f"messages[{index}]", messages))
    return tuple(messages)


def _read_message(raw: Mapping[str, Any], where: str, earlier: Sequence[Message]) -> Message:
    if not isinstance(raw, Mapping):
        raise RequestError(f"{where} is not an object with role and content.")
    role = raw.get("role")
    if role not in ROLES:
        raise RequestError(f"{where} has role {role!r}. Use one of {', '.join(ROLES)}.")
    calls = _read_calls(raw.get("tool_calls"), where) if role == "assistant" else ()
    reasoning = raw.get("reasoning") or raw.get("reasoning_content") or ""
    if not isinstance(reasoning, str):
        raise RequestError(f"{where}.reasoning is not a string.")
    content = _read_content(raw.get("content"), where, may_be_absent=bool(calls or (role == "assistant" and reasoning)))
    if role == "tool":
        name, call_id = _answered_tool(raw, where, earlier)
        return Message("tool", content, tool_name=name, tool_call_id=call_id)
    return Message("system" if role == "developer" else role, content, reasoning, calls)


def _read_content(content: Any, where: str, *, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if content is None:
        raise RequestError(f"{where} has no content. Give a string, or a list of text parts.")
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}.content is neither a string nor a list of parts.")
    return "".join(_read_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise RequestError(f"{where} is not an object with a type.")
    if kind != "text":
        raise RequestError(f"{where} is of type {kind!r}: text only. Leave out images, audio and files.")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text is not a string.")
    return text


def _read_calls(raw: Any, where: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if isinstance(raw, str) or not isinstance(raw, Sequence):
        raise RequestError(f"{where}.tool_calls is not a list.")
    return tuple(_read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(raw))


def _read_call(raw: Any, where: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} has no function.")
    name = _read_name(function, where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}.function.arguments is not valid JSON: {error}") from error
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.function.arguments is not a JSON object.")
    return ToolCall(str(raw.get("id") or ""), name, arguments)


def _answered_tool(raw: Mapping[str, Any], where: str, earlier: Sequence[Message]) -> tuple[str, str]:
    """Name and call id of the function that a tool message answers for: a call of the assistant message before it."""
    asking = next((message for message in reversed(earlier) if message.role != "tool"), None)
    calls = asking.tool_calls if asking is not None else ()
    if not calls:
        raise RequestError(f"{where} answers no tool call: put it after the assistant message that made the call.")
    call_id = raw.get("tool_call_id")
    found = next((call for call in calls if call_id and call.id == call_id), None)
    if found is None:
        known = ", ".join(call.id for call in calls)
        raise RequestError(f"{where} has tool_call_id {call_id!r}, but the calls before it have {known}.")
    return found.name, found.id


def read_tools(raw: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Tools of a request; RequestError names the one that is wrong."""
    tools = tuple(_read_tool(each, f"tools[{index}]") for index, each in enumerate(raw or ()))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"tools[{index}] is named {name!r} as another one is. Give each a name of its own.")
    return tools


def _read_tool(raw: Any, where: str) -> Tool:
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if kind != "function":
        raise RequestError(f"{where} is of type {kind!r}; only 'function' is supported.")
    function = raw.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} has no function.")
    description, parameters = function.get("description") or "", function.get("parameters") or {}
    if not isinstance(description, str):
        raise RequestError(f"{where}.function.description is not a string.")
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f"{where}.function.parameters is not a JSON schema of an object.")
    _check_schema(parameters, f"{where}.function.parameters")
    return Tool(_read_name(function, where), description, parameters)


def _check_schema(schema: Any, where: str) -> None:
    """What declarations read of a schema has the right shape; the rest is nobody's business here."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where} is not a JSON schema object.")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    kinds = schema.get("type", "")
    if not isinstance(kinds, str) and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise RequestError(f"{where}.type is neither a name nor a list of names.")
    if not isinstance(properties, Mapping):
        raise RequestError(f"{where}.properties is not an object.")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required is not a list of names.")
    for name, each in properties.items():
        _check_schema(each, f"{where}.properties.{name}")
    if schema.get("items") is not None and not isinstance(schema["items"], bool):
        _check_schema(schema["items"], f"{where}.items")


def _read_name(function: Mapping[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise RequestError(f"{where}.function.name is {name!r}. Use 1 to 64 letters, digits, '_', '.' or '-'.")
    return name
