"""T-060: the state an answer starts in comes from the end of its prompt.

A closed thought at the prompt's end is followed by the answer with thinking off, and by one more thought with thinking
on: then the closing marker decides. With thinking off what came before a stray marker was shown already.

Seen red: a start state of its own; a search of the whole prompt.
"""

from __future__ import annotations

import pytest

from outrider.server.chat import GEMMA4
from tests.server.answers import read_in_any_pieces

TURN = "<|turn>user\nHi<turn|>\n<|turn>model\n"
SPOKEN = "<|turn>user\nWhat is <|channel>?<turn|>\n<|turn>model\n"
UNMARKED, MARKED = "think<channel|>answer", "<|channel>think<channel|>answer"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (TURN, MARKED),
        (f"{TURN}<|channel>", UNMARKED),
        (f"{TURN}<|channel>thought\n", UNMARKED),
        (f"{TURN}<|channel><channel|>", UNMARKED),
        (f"{TURN}<|channel>thought\n<channel|>", UNMARKED),
        (f"{TURN}<|channel>thought\n<channel|>", MARKED),
        (SPOKEN, MARKED),
    ],
)
def test_t060_thinking_on(prompt: str, text: str) -> None:
    answer = read_in_any_pieces(text, prompt=prompt, think=True)
    assert (answer.reasoning, answer.content) == ("think", "answer")


def test_t060_a_stray_marker_is_never_shown() -> None:
    answer = read_in_any_pieces(UNMARKED, prompt=f"{TURN}<|channel>thought\n<channel|>", think=False)
    assert (answer.reasoning, answer.content) == ("", "thinkanswer")


def test_t060_after_a_tool_result() -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    messages = [{"role": "user", "content": "Hi"}, call, {"role": "tool", "tool_call_id": "c", "content": "5"}]
    prompt = GEMMA4.render_chat(messages, enable_thinking=True).text
    answer = read_in_any_pieces(UNMARKED, prompt=prompt, think=True)
    assert (answer.reasoning, answer.content) == ("think", "answer")
