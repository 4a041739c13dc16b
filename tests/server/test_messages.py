"""A chat request's messages and tools: what is right is read, what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import RequestError
from outrider.server.messages import read_messages, read_tools

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_text_parts_are_joined_and_developers_are_systems() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    first, second = read_messages([{"role": "developer", "content": "S"}, {"role": "user", "content": parts}])
    assert (first.role, first.content) == ("system", "S")
    assert (second.role, second.content) == ("user", "ab")


def test_calls_and_their_answers() -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    _, calling, answering = read_messages([USER, CALLING, answer])
    assert calling.content == ""
    assert calling.tool_calls[0].arguments == {"a": [1]}
    assert (answering.tool_name, answering.content) == ("f", "42")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_both_names_of_thoughts(name: str) -> None:
    (message,) = read_messages([{"role": "assistant", "content": None, name: "hm"}])
    assert message.reasoning == "hm"


def calling(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        (["Hi"], r"messages\[0\] is not an object"),
        ([USER, {"role": "robot", "content": ""}], r"messages\[1\] has role 'robot'. Use one of system"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "assistant", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is neither"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] is not an object"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is of type 'image_url': text only"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is not a string"),
        ([{"role": "assistant", "content": "", "reasoning": 3}], r"messages\[0\].reasoning is not a string"),
        ([{"role": "assistant", "tool_calls": "f"}], r"messages\[0\].tool_calls is not a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] has no function"),
        ([calling(name="a b")], r"tool_calls\[0\].function.name is 'a b'"),
        ([calling(name="f", arguments="{")], r"tool_calls\[0\].function.arguments is not valid JSON"),
        ([calling(name="f", arguments="[" * 100_000)], r"arguments is not valid JSON"),
        ([calling(name="f", arguments="[1]")], r"arguments is not a JSON object"),
        ([USER, {"role": "tool", "content": "x"}], r"messages\[1\] answers no tool call"),
        ([CALLING, {"role": "tool", "tool_call_id": "c2", "content": "x"}], r"has tool_call_id 'c2', .* have c1"),
    ],
)
def test_what_is_wrong_is_named(messages: list[Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_messages(messages)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def test_tools() -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}
    first, second = read_tools([tool(name="f", description="d", parameters=schema), tool(name="g")])
    assert (first.name, first.description, first.parameters) == ("f", "d", schema)
    assert (second.name, second.description, second.parameters) == ("g", "", {})
    assert read_tools(None) == ()


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([{"type": "retrieval"}], r"tools\[0\] is of type 'retrieval'"),
        (["f"], r"tools\[0\] is of type None"),
        ([{"type": "function"}], r"tools\[0\] has no function"),
        ([tool(name="")], r"tools\[0\].function.name is ''"),
        ([tool(name="f", description=3)], r"tools\[0\].function.description is not a string"),
        ([tool(name="f", parameters=[1])], r"tools\[0\].function.parameters is not a JSON schema"),
        ([tool(name="f", parameters={"type": "string"})], r"parameters is not a JSON schema of an object"),
        ([tool(name="f", parameters={"properties": [1]})], r"parameters.properties is not an object"),
        ([tool(name="f", parameters={"properties": {"a": 1}})], r"properties.a is not a JSON schema object"),
        ([tool(name="f", parameters={"properties": {"a": {"type": 1}}})], r"properties.a.type is neither"),
        ([tool(name="f", parameters={"properties": {"a": {"items": 1}}})], r"a.items is not a JSON schema object"),
        ([tool(name="f", parameters={"required": "a"})], r"parameters.required is not a list"),
        ([tool(name="f"), tool(name="f")], r"tools\[1\] is named 'f' as another one is"),
    ],
)
def test_what_is_wrong_with_a_tool_is_named(tools: list[Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_tools(tools)
