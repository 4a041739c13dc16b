"""Thoughts, content and calls are told apart, whatever the pieces the text comes in.

Seen red: markers looked for in one piece only; a thought's trailing whitespace shown at once; labels recognised only
when whole; a cut off call completed; the quote of another state taken for a string's.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.server.chat import CONTROL_TOKENS, GEMMA4, PLAIN
from outrider.server.parser import ChatParser, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from tests.server.answers import TOOLS, Answer, read_answer, read_in_any_pieces
from tests.server.test_tool_syntax import ARGUMENTS

CALL = '<|tool_call>call:f{a:1,s:<|"|>x y<|"|>}<tool_call|>'
PIECES = st.sampled_from(
    [*CONTROL_TOKENS, "thought\n", "thought", "call:f{", "{", "}", "a:", "1", ",", "[", "]", " ", "\n", "hm", "<", "<|"]
)


def message(content: str = "", reasoning: str = "", *calls: tuple[str, Any], finish_reason: str = "stop") -> Answer:
    texts = [(f"call_{at}", name, json.dumps(each, separators=(",", ":"))) for at, (name, each) in enumerate(calls)]
    return Answer(content, reasoning, texts, finish_reason)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Hello <b> <|there|>", message("Hello <b> <|there|>")),
        ("<|channel>thought\nhm\n\nwell\n<channel|>Yes.", message("Yes.", "hm\n\nwell")),
        ("<|channel>thought\n<channel|>Yes.", message("Yes.")),
        ("<|channel>thought<channel|>Yes.", message("Yes.")),
        ("<|channel>hm<channel|>Yes.", message("Yes.", "hm")),
        ("<|channel>thought\nhm", message("", "hm")),
        ("thought\nYes.", message("Yes.")),
        ("thought<channel|>Yes.", message("Yes.")),
        ("thoughtful", message("thoughtful")),
        ("thought", message("thought")),
        ('Say <|"|>x<|"|>.<turn|>', message('Say "x".')),
        (CALL, message("", "", ("f", {"a": 1, "s": "x y"}), finish_reason="tool_calls")),
        (
            f"Sure. {CALL}\n{CALL} ok",
            message("Sure. ok", "", *[("f", {"a": 1, "s": "x y"})] * 2, finish_reason="tool_calls"),
        ),
        (f"<|channel>thought\nhm{CALL}", message("", "hm", ("f", {"a": 1, "s": "x y"}), finish_reason="tool_calls")),
        ("<|tool_call>nonsense<tool_call|> ok", message("nonsense ok")),
        ("<|tool_call>no call {x}", message("no call {x}")),
        ('<|tool_call>call:f{a:<|"|>x<tool_call|>', message("", "", ("f", {"a": "x"}), finish_reason="tool_calls")),
        ("<|tool_call>call:f{} ok", message("ok", "", ("f", {}), finish_reason="tool_calls")),
        ("a<channel|>b<tool_call|>c", message("abc")),
    ],
)
def test_messages(text: str, wanted: Answer) -> None:
    assert read_in_any_pieces(text) == wanted


def test_a_bare_thought_line_with_thinking_on_opens_a_thought() -> None:
    assert read_in_any_pieces("thought\nhm\n<channel|>Yes.", think=True) == message("Yes.", "hm")


@pytest.mark.parametrize(("end", "arguments"), [('s:<|"|>rm -rf /', '{"s":"rm -rf /'), ("s:12", '{"s":'), ("s", "{")])
@pytest.mark.parametrize("finish_reason", ["length", "stop", "abort"])
def test_a_call_that_is_cut_off_stays_so(end: str, arguments: str, finish_reason: str) -> None:
    answer = read_in_any_pieces(f"{CALL}<|tool_call>call:f{{{end}", finish_reason=finish_reason)
    assert answer.calls[1] == ("call_1", "f", arguments)
    assert answer.finish_reason == finish_reason


def test_a_call_without_its_name_is_not_shown() -> None:
    answer = read_in_any_pieces("ok <|tool_call>call:ge", finish_reason="length")
    assert answer == message("ok ", finish_reason="length")


def test_finish_reasons_of_the_engine_stay() -> None:
    assert read_answer([CALL], finish_reason="length").finish_reason == "length"


def test_without_tools_nothing_is_a_call() -> None:
    assert read_in_any_pieces(CALL, tools=()) == message('call:f{a:1,s:"x y"}')


def test_the_plain_template_has_content_only() -> None:
    text = " thought\n<|channel>x<channel|> <|tool_call>"
    assert read_in_any_pieces(text, template=PLAIN, think=True) == message(text.lstrip())


def test_deltas_come_as_early_as_they_can() -> None:
    parser = ChatParser(GEMMA4, TOOLS, enable_thinking=True)
    assert parser.push("<|channel>thou") == []
    assert parser.push("ght\nhm ") == [ReasoningDelta("hm")]
    assert parser.push("well<channel|>Yes") == [ReasoningDelta(" well"), ContentDelta("Yes")]
    start, arguments = parser.push('<|tool_call>call:f{s:<|"|>x ')
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name, start.id[:5]) == (0, "f", "call_")
    assert arguments == ToolCallArguments(0, '{"s":"x ')
    assert parser.push("y") == [ToolCallArguments(0, "y")]
    assert parser.push('<|"|>}<') == [ToolCallArguments(0, '"}')]
    assert parser.finish("stop") == ([ContentDelta("<")], "tool_calls")


@given(st.lists(PIECES, max_size=14), st.booleans(), st.sampled_from(["", "<|channel>thought\n", "<|channel>"]))
@settings(max_examples=150, deadline=None)
def test_any_cut_gives_the_same_message(parts: list[str], think: bool, prompt: str) -> None:
    text = "".join(parts)
    whole = read_answer([text], think=think, prompt=prompt)
    assert read_answer(list(text), think=think, prompt=prompt) == whole
    assert read_answer(parts, think=think, prompt=prompt) == whole
    for name in ("content", "reasoning"):
        assert not any(marker in getattr(whole, name) for marker in CONTROL_TOKENS)


WORDS = st.text("ab \n{}:<", max_size=10).map(str.strip).filter(lambda text: text != "thought")
# A name or text that holds a control token's spelling cannot be written: there are no escapes.
WRITABLE = ARGUMENTS.filter(lambda arguments: not any(token in repr(arguments) for token in CONTROL_TOKENS))


@given(WORDS, WORDS, st.lists(WRITABLE, max_size=3), st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_what_is_rendered_is_read(content: str, reasoning: str, calls: list[dict[str, Any]], size: int) -> None:
    tool_calls = [{"id": f"c{at}", "function": {"name": "f", "arguments": each}} for at, each in enumerate(calls)]
    said = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": tool_calls}
    messages = [{"role": "user", "content": "Hi"}]
    options = {"enable_thinking": True, "add_generation_prompt": False}
    before = GEMMA4.render_chat(messages, [], **options).text + "<|turn>model\n"
    text = GEMMA4.render_chat([*messages, said], [], **options).text
    assert text.startswith(before)
    written = text[len(before) :].removesuffix("\n")  # a model ends with its turn
    answer = read_answer([written[at : at + size] for at in range(0, len(written), size)], think=True)
    assert (answer.content, answer.reasoning) == (content, reasoning)
    assert answer.called == [("f", each) for each in calls]
    assert answer.finish_reason == ("tool_calls" if calls else "stop")
