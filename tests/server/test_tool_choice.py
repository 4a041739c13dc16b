"""tool_choice: what it offers, what it refuses, and that a forced call parses and matches its schema."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core import SamplingParams
from outrider.errors import RequestError
from outrider.server.chat import GEMMA4, PLAIN
from outrider.server.messages import Tool
from outrider.server.tool_choice import read_tool_choice
from tests.byte_tokenizer import BOS, CALL, CALL_END, EOS, QUOTE, byte_tokenizer
from tests.cases.constrained import VOCAB_SIZE
from tests.scripted import TableTarget, make_test_engine
from tests.server.answers import read_answer

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
}
TOOLS = (Tool("weather", "", PARAMETERS), Tool("stop", "", {"type": "object", "properties": {}}))
NAMED = {"type": "function", "function": {"name": "weather"}}


def test_free_choices() -> None:
    assert read_tool_choice("none", TOOLS, GEMMA4) == ((), None)
    for choice in (None, "auto"):
        assert read_tool_choice(choice, TOOLS, PLAIN) == (TOOLS, None)


@pytest.mark.parametrize(
    ("choice", "tools", "says"),
    [
        ("required", (), "there are no tools"),
        ("any", TOOLS, "tool_choice is 'any'"),
        ({"type": "function"}, TOOLS, "Use 'auto', 'none', 'required' or a named function"),
        ({"type": "function", "function": {"name": "x"}}, TOOLS, "names 'x', which is not one of the tools"),
    ],
)
def test_what_is_refused(choice: Any, tools: tuple[Tool, ...], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_tool_choice(choice, tools, GEMMA4)


def test_the_plain_template_cannot_call() -> None:
    with pytest.raises(RequestError, match="no chat template that knows tools"):
        read_tool_choice("required", TOOLS, PLAIN)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_parses(choice: Any) -> None:
    logits = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, 128:] -= 30.0  # ASCII, or a cut character would spoil its neighbours
    logits[:, [EOS, QUOTE, CALL, CALL_END]] = 4.0
    tokenizer = byte_tokenizer()
    engine = make_test_engine(TableTarget(logits), tokenizer=tokenizer, end_token_ids=[EOS], max_seats=8)
    params = SamplingParams(
        grammar=read_tool_choice(choice, TOOLS, GEMMA4).grammar,
        shown_token_ids=GEMMA4.shown_token_ids(tokenizer),
        temperature=1.0,
        max_tokens=110,
    )
    requests = [engine.add([BOS], params) for _ in range(8)]
    while engine.has_work:
        engine.step()
    for request in requests:
        answer = read_answer([request.text], tools=TOOLS, finish_reason=str(request.finish_reason))
        assert answer.content == ""
        assert answer.finish_reason == "tool_calls"
        for name, arguments in answer.called:
            assert list(arguments) == (["city", "days"] if name == "weather" else [])
            assert arguments.get("days", 1) in (1, 2)
    names = {name for request in requests for name, _ in read_answer([request.text], tools=TOOLS).called}
    assert names == ({"weather"} if choice == NAMED else {"weather", "stop"})
