"""T-059: a piece that holds the end of a thought and what follows it loses neither.

Seen red: one delta a piece, the later state's.
"""

from __future__ import annotations

import pytest

from tests.server.answers import read_in_any_pieces

THOUGHTS = {"bare": "<|channel>plan: add<channel|>", "gemma": "<|channel>thought\nplan: add\n<channel|>"}


@pytest.mark.parametrize("thought", THOUGHTS.values(), ids=THOUGHTS)
@pytest.mark.parametrize("think", [True, False])
def test_t059_thought_then_answer(thought: str, think: bool) -> None:
    answer = read_in_any_pieces(f"{thought}It is 5.", think=think)
    assert (answer.reasoning, answer.content, answer.calls) == ("plan: add", "It is 5.", [])


@pytest.mark.parametrize("thought", THOUGHTS.values(), ids=THOUGHTS)
def test_t059_thought_then_call(thought: str) -> None:
    answer = read_in_any_pieces(f"{thought}<|tool_call>call:f{{n:5}}<tool_call|>", think=True)
    assert (answer.reasoning, answer.content, answer.called) == ("plan: add", "", [("f", {"n": 5})])
