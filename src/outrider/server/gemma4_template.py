"""Gemma 4's chat template, for checkpoints that bring none: turns, tools, tool calls and thoughts.

The layout is that of the template that Google publishes with the models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.server.messages import Message, Rendered, Tool
from outrider.server.tool_syntax import spell, spell_fields
from outrider.tokenizer import BOS_TOKEN

TURN, TURN_END = "<|turn>", "<turn|>"
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
CALL, CALL_END = "<|tool_call>", "<tool_call|>"
RESPONSE, RESPONSE_END = "<|tool_response>", "<tool_response|>"
TOOL, TOOL_END = "<|tool>", "<tool|>"
THINK = "<|think|>"
THOUGHT = f"{CHANNEL}thought\n"


def render_gemma4(
    messages: Sequence[Message], tools: Sequence[Tool], *, enable_thinking: bool, add_generation_prompt: bool
) -> Rendered:
    """A chat as Gemma 4 reads it. Thoughts of the history are shown only after the last user message."""
    parts, boundaries, rest = [BOS_TOKEN], [], list(messages)
    if enable_thinking or tools or rest[0].role == "system":
        system = rest.pop(0).content.strip() if rest[0].role == "system" else ""
        declared = "".join(f"{TOOL}{declaration(tool)}{TOOL_END}" for tool in tools)
        think = f"{THINK}\n" if enable_thinking else ""
        parts.append(f"{TURN}system\n{think}{system}{declared}{TURN_END}\n")
        boundaries.append(sum(map(len, parts)))
    last_user = max((index for index, message in enumerate(rest) if message.role == "user"), default=-1)
    is_open = False  # a model turn may go on in the next message
    for index, message in enumerate(rest):
        if message.role == "assistant":
            turn, is_open_now = _model_turn(rest, index, is_recent=index > last_user)
            parts.append(turn if is_open else f"{TURN}model\n{turn}")
            is_open = is_open_now
        elif message.role != "tool":
            parts.append(f"{TURN}{message.role}\n{message.content.strip()}{TURN_END}\n")
            is_open = False
            if message.role == "user":
                boundaries.append(sum(map(len, parts)))
    if add_generation_prompt:
        parts.append(_generation_prompt(rest, is_open=is_open, enable_thinking=enable_thinking))
    return Rendered("".join(parts), tuple(boundaries))


def _model_turn(messages: Sequence[Message], index: int, *, is_recent: bool) -> tuple[str, bool]:
    """One assistant message with the tool messages that answer it, and whether its turn stays open."""
    message, end = messages[index], index + 1
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    responses, content = messages[index + 1 : end], without_thoughts(message.content)
    text = f"{THOUGHT}{message.reasoning}\n{CHANNEL_END}" if message.reasoning and is_recent else ""
    text += "".join(
        f"{CALL}call:{call.name}{{{spell_fields(call.arguments)}}}{CALL_END}" for call in message.tool_calls
    )
    text += "".join(_response(each) for each in responses) + content
    if message.tool_calls and not responses:
        return text + RESPONSE, True  # as the model itself ends when it waits for a tool
    goes_on = messages[end].role == "assistant" if end < len(messages) else bool(responses and not content)
    return (text, True) if goes_on else (f"{text}{TURN_END}\n", False)


def _response(message: Message) -> str:
    return f"{RESPONSE}response:{message.tool_name}{{value:{spell(message.content)}}}{RESPONSE_END}"


def _generation_prompt(messages: Sequence[Message], *, is_open: bool, enable_thinking: bool) -> str:
    if not is_open:
        return f"{TURN}model\n" + ("" if enable_thinking else f"{THOUGHT}{CHANNEL_END}")
    return THOUGHT if enable_thinking and messages[-1].role == "tool" else ""


def without_thoughts(content: str) -> str:
    """An assistant's text without thoughts that were left in it."""
    return "".join(part.split(CHANNEL)[0] for part in content.split(CHANNEL_END)).strip()


def declaration(tool: Tool) -> str:
    """`declaration:NAME{…}` of one tool."""
    text = f"declaration:{tool.name}{{description:{spell(tool.description)}"
    if tool.parameters:
        read = ("properties", "required")
        fields = {name: value for name, value in tool.parameters.items() if name in read and value}
        text += f",parameters:{_schema({**fields, 'type': 'object'})}"
    return text + "}"


def _schema(schema: Mapping[str, Any]) -> str:
    """A JSON schema as declarations have it: fields by name, types in capitals, fields it does not know left out."""
    fields: dict[str, str] = {}
    for name in ("description", "enum"):
        if schema.get(name):
            fields[name] = spell(schema[name])
    if isinstance(schema.get("items"), Mapping):
        fields["items"] = _schema(schema["items"])
    if schema.get("nullable"):
        fields["nullable"] = "true"
    if isinstance(schema.get("properties"), Mapping):
        ordered = sorted(schema["properties"].items(), key=lambda item: item[0].lower())
        fields["properties"] = "{" + ",".join(f"{name}:{_schema(value)}" for name, value in ordered) + "}"
    if schema.get("required"):
        fields["required"] = spell(schema["required"])
    kinds = schema.get("type") or ""
    fields["type"] = spell(kinds.upper() if isinstance(kinds, str) else [kind.upper() for kind in kinds])
    return "{" + ",".join(f"{name}:{text}" for name, text in fields.items()) + "}"
