"""OpenAI's `tool_choice`: which tools a chat offers, and the grammar that makes the target call one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outrider.core import Grammar
from outrider.errors import RequestError
from outrider.server.chat import ChatTemplate
from outrider.server.gemma4_template import CALL, CALL_END, CHANNEL, CHANNEL_END
from outrider.server.messages import Tool


class ToolChoice(NamedTuple):
    """What a request's tool_choice comes to."""

    tools: tuple[Tool, ...]
    """To be parsed for, and to be declared if there are any."""
    grammar: Grammar | None
    """Wants a prompt that leaves no thought open, and `shown_token_ids`; None where the target is free."""


def read_tool_choice(
    choice: Any, tools: Sequence[Tool], template: ChatTemplate, *, parallel_tool_calls: bool = True
) -> ToolChoice:
    """'auto' (and None), 'none', 'required' or a named function; RequestError for anything else."""
    if choice == "none":
        return ToolChoice((), None)
    if choice is None or choice == "auto":
        return ToolChoice(tuple(tools), None)
    if not template.control_tokens:
        raise RequestError("tool_choice asks for a call, but the target has no chat template that knows tools.")
    if choice == "required":
        if not tools:
            raise RequestError("tool_choice is 'required', but there are no tools. Give some, or leave it out.")
        return ToolChoice(tuple(tools), call_grammar(tools, is_single=not parallel_tool_calls))
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise RequestError(f"tool_choice is {choice!r}. Use 'auto', 'none', 'required' or a named function.")
    named = [tool for tool in tools if tool.name == name]
    if not named:
        raise RequestError(f"tool_choice names {name!r}, which is not one of the tools.")
    return ToolChoice(tuple(tools), call_grammar(named, is_single=True))


def call_grammar(tools: Sequence[Tool], *, is_single: bool) -> Grammar:
    """One call, or one and more, of these tools with arguments that match their schemas."""
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(tool) for tool in tools],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": is_single,
    }
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": calls}))


def _call(tool: Tool) -> dict[str, Any]:
    arguments = {
        "type": "json_schema",
        "json_schema": {"type": "object", **tool.parameters},
        "style": "gemma",
        "excludes": [
            CALL,
            CALL_END,
            CHANNEL,
            CHANNEL_END,
        ],  # a marker in a string would end the call; this costs maxLength
    }
    return {"type": "tag", "begin": f"{CALL}call:{tool.name}", "content": arguments, "end": CALL_END}
