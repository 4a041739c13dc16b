"""T-034, T-035, T-059 and T-060 at the server: streamed and whole messages are one, however the tokens are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving import cut_scripts, events, joined_message, serve, whole_message

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = 'Sure. <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
ANSWERS = {
    "characters": ("aé삼🙂🙂z", False, {"content": "aé삼🙂🙂z"}),
    "call": (CALL, False, {"content": "Sure.", "calls": [["get_weather", {"city": "Oslo", "days": 3}]]}),
    "thought": ("<|channel>plan: add<channel|>It is 5.", True, {"reasoning": "plan: add", "content": "It is 5."}),
    "thought and call": (
        f"<|channel>plan: add<channel|>{CALL[6:]}",
        True,
        {"reasoning": "plan: add", "calls": [["get_weather", {"city": "Oslo", "days": 3}]]},
    ),
}


@pytest.mark.parametrize(("text", "thinks", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_no_cut_changes_the_message(text: str, thinks: bool, expected: dict[str, Any]) -> None:
    scripts = cut_scripts(text, num_random=20)
    body = {"tools": [TOOL], "reasoning_effort": "high" if thinks else "none"}
    with serve(scripts) as served:
        for key in scripts:
            asked = {**body, "messages": [{"role": "user", "content": key}]}
            whole = whole_message(served.post("/v1/chat/completions", asked).json())
            streamed = events(served.post("/v1/chat/completions", {**asked, "stream": True}))
            assert joined_message(streamed) == whole
            assert "\N{REPLACEMENT CHARACTER}" not in json.dumps(streamed, ensure_ascii=False)
            calls = [[name, json.loads(arguments)] for name, arguments in whole["calls"]]
            assert calls == expected.get("calls", [])
            assert whole["content"].strip() == expected.get("content", "")
            assert whole["reasoning"] == expected.get("reasoning", "")
            assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
