from __future__ import annotations

from typing import Any

import pytest

from outrider.backends.scripted import byte_tokenizer
from outrider.core import Grammar
from outrider.errors import RequestError
from outrider.server.chat import GEMMA4, PLAIN
from outrider.server.chat_request import PreparedChat, prepare_chat, wants_thinking
from outrider.server.faults import Fault
from outrider.server.schemas import ChatBody

TOKENIZER = byte_tokenizer()
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


def body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [USER], **fields})


def prepare(**fields: Any) -> PreparedChat:
    return prepare_chat(body(**fields), GEMMA4, TOKENIZER)


def test_a_chat_is_rendered_and_stops_at_turns() -> None:
    chat = prepare(stop=["x"], stop_token_ids=[5])
    assert TOKENIZER.decode(chat.prompt_token_ids).startswith("user\nhi")
    assert chat.prompt_token_ids.count(TOKENIZER.bos_id) == 1
    assert set(chat.params.stop_token_ids) >= {5, 258}
    assert chat.params.stop_strings == ("x",)
    assert set(chat.params.shown_token_ids) >= {259, 260, 261, 262}
    assert 258 not in prepare(ignore_eos=True).params.stop_token_ids
    plain = prepare_chat(body(), PLAIN, TOKENIZER)
    assert plain.params.stop_strings == ("\nUser:",)
    assert plain.params.shown_token_ids == ()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
def test_a_call_can_be_forced(choice: Any) -> None:
    chat = prepare(tools=[TOOL], tool_choice=choice, reasoning_effort="high")
    assert chat.params.grammar is not None
    assert chat.params.grammar.kind == "structural_tag"
    assert not chat.enable_thinking
    with pytest.raises(RequestError, match="tool_choice"):
        prepare(tool_choice=choice)


def test_tools_are_shown_unless_none_may_be_called() -> None:
    assert "get" in prepare(tools=[TOOL]).rendered.text
    assert "get" not in prepare(tools=[TOOL], tool_choice="none").rendered.text


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, False),
    ],
)
def test_thinking_is_asked_for(fields: dict[str, Any], thinks: bool) -> None:
    assert wants_thinking(body(**fields)) is thinks


def test_boundaries_are_prompt_lengths_where_turns_end() -> None:
    turns = [USER, {"role": "assistant", "content": "ho"}, USER, {"role": "assistant", "content": "ho"}, USER]
    chat = prepare(messages=[{"role": "system", "content": "be kind"}, *turns])
    assert len(chat.boundaries) == 3
    shared = prepare(messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": "other"}])
    system = chat.boundaries[0]
    assert chat.prompt_token_ids[:system] == shared.prompt_token_ids[:system]
    before = prepare(messages=[{"role": "system", "content": "be kind"}, *turns[:3]])
    assert chat.boundaries[1] == before.boundaries[-1]
    assert chat.prompt_token_ids[: chat.boundaries[1]] == before.prompt_token_ids[: before.boundaries[-1]]


def test_what_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(3000):
        schema = {"type": "object", "properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    with pytest.raises(RequestError, match="nested too deeply"):
        prepare_chat(ChatBody.model_construct(messages=[USER], tools=[tool]), GEMMA4, TOKENIZER)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            Grammar("json_schema", '{"type": "object"}'),
        ),
        ({"structured_outputs": {"json": {"type": "array"}}}, Grammar("json_schema", '{"type": "array"}')),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, Grammar("json_schema", '{"type": "null"}')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("ebnf", 'root ::= "a"')),
    ],
)
def test_the_form_of_an_answer_is_a_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert prepare(**fields).params.grammar == grammar


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"structured_outputs": {"regex": "a", "grammar": "b"}},
    ],
)
def test_a_form_that_cannot_be_had_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(Fault) as refused:
        prepare(**fields)
    assert refused.value.param in fields
