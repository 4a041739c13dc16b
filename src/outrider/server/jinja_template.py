"""A checkpoint's own chat template, run in Jinja's sandbox with the names and filters that transformers gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import ConfigError, RequestError
from outrider.server.messages import Message, Rendered, Tool
from outrider.tokenizer import BOS_TOKEN

_SENTINEL = "\N{INVISIBLE SEPARATOR}outrider\N{INVISIBLE SEPARATOR}"  # stands where a user's words would
# All that a template can raise over messages that it was not written for.
_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class JinjaRenderer:
    """Renders chats with the source of a template; ConfigError where it is not valid Jinja."""

    def __init__(self, source: str, *, origin: str, special_tokens: Mapping[str, str]) -> None:
        self.special_tokens = {"bos_token": BOS_TOKEN, **special_tokens}
        try:
            self.template: Template = _environment().from_string(source)
        except TemplateError as error:
            raise ConfigError(f"{origin} is not a valid Jinja template: {error}. Correct or remove it.") from error

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, enable_thinking: bool, add_generation_prompt: bool
    ) -> Rendered:
        """A chat as the template has it, with exactly one begin token."""
        options = {
            "tools": [_tool_fields(tool) for tool in tools] or None,
            "documents": None,
            "enable_thinking": enable_thinking,
        }
        text = self._render(messages, {**options, "add_generation_prompt": add_generation_prompt})
        boundaries = [self._user_boundary(messages, options, text)] if messages[-1].role != "system" else []
        for index, message in enumerate(messages):
            if message.role == "user":
                so_far = self._render(messages[: index + 1], {**options, "add_generation_prompt": False})
                boundaries.append(len(so_far) if text.startswith(so_far) else 0)
        return Rendered(text, tuple(sorted({boundary for boundary in boundaries if boundary})))

    def _user_boundary(self, messages: Sequence[Message], options: dict[str, Any], text: str) -> int:
        """Where the first user message's own words begin, 0 if that cannot be told."""
        first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
        if first is None:
            return 0
        other = [*messages[:first], Message("user", _SENTINEL)]
        before, found, _ = self._render(other, {**options, "add_generation_prompt": False}).partition(_SENTINEL)
        return len(before) if found and text.startswith(before) else 0

    def _render(self, messages: Sequence[Message], options: dict[str, Any]) -> str:
        bos = self.special_tokens["bos_token"]
        try:
            text = self.template.render(**self.special_tokens, messages=[_fields(each) for each in messages], **options)
        except _FAILURES as error:
            raise RequestError(f"the target's chat template refused the messages: {error}") from error
        while text.startswith(bos):
            text = text.removeprefix(bos)
        return bos + text


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Without HTML's escapes, which Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        fields |= {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    return fields


def _tool_fields(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
