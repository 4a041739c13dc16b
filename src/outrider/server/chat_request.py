"""A chat request made ready: rendered, tokenised, parameters as the template wants them, a parser for its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from outrider.core import Grammar, SamplingParams
from outrider.errors import RequestError
from outrider.server.chat import ChatTemplate
from outrider.server.chat_replies import ThoughtCounter
from outrider.server.faults import Fault
from outrider.server.messages import Rendered, Tool, read_tools
from outrider.server.parser import ChatParser
from outrider.server.schemas import ChatBody, StructuredOutputs
from outrider.server.tool_choice import read_tool_choice
from outrider.server.translate import chat_params
from outrider.tokenizer import Tokenizer

NUM_LAST_BOUNDARIES = 2  # the latest user turn, and the one that the chat before this ended with


@dataclass(frozen=True)
class PreparedChat:
    """What the backend gets, and what reading its answer takes."""

    template: ChatTemplate
    rendered: Rendered
    prompt_token_ids: list[int]
    boundaries: tuple[int, ...]
    """Numbers of prompt tokens at which other chats with the same beginning are likely to part from this one."""
    params: SamplingParams
    tools: tuple[Tool, ...]
    enable_thinking: bool

    def parser(self) -> ChatParser:
        """A new one for each answer."""
        return ChatParser(self.template, self.tools, enable_thinking=self.enable_thinking, prompt=self.rendered.text)

    def thought_counter(self, tokenizer: Tokenizer) -> ThoughtCounter:
        """A new one for each answer."""
        return ThoughtCounter(tokenizer, self.rendered.text, enable_thinking=self.enable_thinking)


def prepare_chat(body: ChatBody, template: ChatTemplate, tokenizer: Tokenizer) -> PreparedChat:
    """Check, render and tokenise a chat; RequestError names what is wrong with it."""
    with _readable_depth():
        return _prepare(body, template, tokenizer)


def _prepare(body: ChatBody, template: ChatTemplate, tokenizer: Tokenizer) -> PreparedChat:
    enable_thinking = wants_thinking(body)
    choice = read_tool_choice(
        body.tool_choice, read_tools(body.tools), template, parallel_tool_calls=body.parallel_tool_calls is not False
    )
    if choice.grammar is not None:
        enable_thinking = False  # a forced call is the whole answer
    tools = body.tools if choice.tools else None
    rendered = template.render_chat(body.messages, tools, enable_thinking=enable_thinking)
    params = chat_params(body)
    params = replace(
        params,
        grammar=choice.grammar or grammar_of(body),
        shown_token_ids=template.shown_token_ids(tokenizer),
        stop_token_ids=(*params.stop_token_ids, *(() if params.ignore_eos else template.stop_token_ids(tokenizer))),
        stop_strings=(*params.stop_strings, *template.stop_strings),
    )
    token_ids = tokenizer.encode(rendered.text)
    boundaries = token_boundaries(rendered, token_ids, tokenizer)
    return PreparedChat(template, rendered, token_ids, boundaries, params, choice.tools, enable_thinking)


def token_boundaries(rendered: Rendered, token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The first and the last few boundaries of a rendered chat in tokens, where no token lies across them."""
    found = []
    for end in dict.fromkeys([*rendered.boundaries[:1], *rendered.boundaries[-NUM_LAST_BOUNDARIES:]]):
        before = tokenizer.encode(rendered.text[:end])
        if before == token_ids[: len(before)]:
            found.append(len(before))
    return tuple(found)


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    enable_thinking: bool,
) -> Rendered:
    """The prompt of a chat alone."""
    with _readable_depth():
        return template.render_chat(messages, tools, enable_thinking=enable_thinking)


@contextmanager
def _readable_depth() -> Iterator[None]:
    """What is nested too deeply to be read is refused like all that is malformed."""
    try:
        yield
    except RecursionError:
        raise RequestError("messages or tools are nested too deeply. Make them flatter.") from None


def grammar_of(body: ChatBody) -> Grammar | None:
    """What response_format, or else vLLM's structured_outputs, wants the answer to match."""
    wanted = body.response_format
    if wanted is not None and wanted.type == "json_object":
        return Grammar("json_object")
    if wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise Fault(400, "response_format.json_schema has no schema; give one.", param="response_format")
        return Grammar("json_schema", json.dumps(wanted.json_schema.schema_))
    outputs = body.structured_outputs or StructuredOutputs.model_validate({})
    schema = json.dumps(outputs.json_) if isinstance(outputs.json_, dict) else outputs.json_
    found = {
        "json_schema": schema,
        "regex": outputs.regex,
        "ebnf": outputs.grammar,
    }
    given = [Grammar(kind, text) for kind, text in found.items() if text is not None]
    if len(given) > 1:
        raise Fault(400, "structured_outputs has several grammars; give one.", param="structured_outputs")
    return given[0] if given else None


def wants_thinking(body: ChatBody) -> bool:
    """chat_template_kwargs.enable_thinking where given, else reasoning_effort; no thinking unless asked."""
    wanted = (body.chat_template_kwargs or {}).get("enable_thinking")
    return wanted if isinstance(wanted, bool) else body.reasoning_effort not in (None, "none")
