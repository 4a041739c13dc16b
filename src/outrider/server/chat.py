"""Chats to text: which template a target has, and one way to render with any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider.errors import ConfigError, RequestError
from outrider.server.gemma4_template import (
    CALL,
    CALL_END,
    CHANNEL,
    CHANNEL_END,
    RESPONSE,
    TURN,
    TURN_END,
    render_gemma4,
)
from outrider.server.jinja_template import JinjaRenderer
from outrider.server.messages import Message, Rendered, Tool, read_messages, read_tools
from outrider.server.tool_syntax import QUOTE
from outrider.tokenizer import BOS_TOKEN, Tokenizer

CONTROL_TOKENS = (CHANNEL, CHANNEL_END, CALL, CALL_END, RESPONSE, TURN, TURN_END, QUOTE)
"""What the parser of an answer wants to see in its text."""
STOP_TOKENS = (TURN_END, RESPONSE, "<end_of_turn>")
"""Where a model hands over to the user or to a tool, in any of its templates."""


class Renderer(Protocol):
    """Turns checked messages and tools into text."""

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, enable_thinking: bool, add_generation_prompt: bool
    ) -> Rendered: ...


@dataclass(frozen=True)
class ChatTemplate:
    """How a target wants to be talked to."""

    name: str
    """'gemma4' or 'plain' for those built in, else the file that it comes from."""
    render: Renderer
    control_tokens: tuple[str, ...] = ()
    """Spelled out in the text that a `ChatParser` reads; empty where an answer is nothing but text."""
    stop_tokens: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        enable_thinking: bool,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """The prompt of a chat, in OpenAI's form; RequestError names the message or tool that is wrong."""
        return self.render(
            read_messages(messages),
            read_tools(tools),
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
        )

    def shown_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """For `SamplingParams.shown_token_ids`."""
        return _known_ids(tokenizer, self.control_tokens)

    def stop_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """For `SamplingParams.stop_token_ids`."""
        return _known_ids(tokenizer, self.stop_tokens)


def _known_ids(tokenizer: Tokenizer, tokens: Sequence[str]) -> tuple[int, ...]:
    found = (tokenizer.id_of(token) for token in tokens)
    return tuple(token_id for token_id in found if token_id is not None)


def render_plain(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    *,
    enable_thinking: bool,  # noqa: ARG001 - a pretrained model has no thoughts to show
    add_generation_prompt: bool,
) -> Rendered:
    """A dialogue as a pretrained model may have read it: "User: …" and "Assistant: …", no thoughts, no tools."""
    if tools or any(message.tool_calls or message.role == "tool" for message in messages):
        raise RequestError("this target has no chat template, and the plain one knows no tools. Leave them out.")
    parts, boundaries = [BOS_TOKEN], []
    names = {"system": "", "user": "User: ", "assistant": "Assistant: "}
    for index, message in enumerate(messages):
        parts.append(f"{names[message.role]}{message.content.strip()}\n\n")
        if message.role == "user" or (message.role == "system" and index == 0):
            boundaries.append(sum(map(len, parts)))
    if add_generation_prompt:
        parts.append("Assistant:")
    return Rendered("".join(parts), tuple(boundaries))


PLAIN = ChatTemplate("plain", render_plain, stop_strings=("\nUser:",))
"""For targets without a template, such as the embedded default: a pretrained model that was taught no chat."""
GEMMA4 = ChatTemplate("gemma4", render_gemma4, CONTROL_TOKENS, STOP_TOKENS)


def find_template(directory: Path | None, tokenizer: Tokenizer) -> ChatTemplate:
    """The template in a checkpoint's directory, else Gemma 4's if the vocabulary has its turns, else the plain one.

    A directory has it as `chat_template.jinja` or in `tokenizer_config.json`.
    """
    config = _tokenizer_config(directory)
    special_tokens = {name: text for name in ("bos_token", "eos_token", "pad_token") if (text := _token(config, name))}
    path = directory / "chat_template.jinja" if directory is not None else None
    if path is not None and path.is_file():
        return _from_source(path.read_text(encoding="utf-8"), path, special_tokens)
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name, as [{"name": "default", "template": "…"}]
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    if isinstance(source, str) and directory is not None:
        return _from_source(source, directory / "tokenizer_config.json", special_tokens)
    return PLAIN if tokenizer.id_of(TURN) is None else GEMMA4


def _from_source(source: str, path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    renderer = JinjaRenderer(source, origin=str(path), special_tokens=special_tokens)
    return ChatTemplate(str(path), renderer, CONTROL_TOKENS, STOP_TOKENS)


def _tokenizer_config(directory: Path | None) -> dict[str, Any]:
    path = directory / "tokenizer_config.json" if directory is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}. Fetch it again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object. Fetch it again.")
    return config


def _token(config: Mapping[str, Any], name: str) -> str | None:
    """A special token of tokenizer_config.json, which has it as text or as an object."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
