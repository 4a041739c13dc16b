"""Gemma 4's template: facts of the published one, turn by turn."""

from __future__ import annotations

from typing import Any

from outrider.server.gemma4_template import declaration, render_gemma4
from outrider.server.messages import Rendered, Tool, read_messages, read_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City"}},
            "required": ["city"],
        },
    },
}
DECLARED = (
    '<|tool>declaration:weather{description:<|"|>Weather<|"|>,parameters:{properties:{city:{description:<|"|>City<|"|>,'
    'type:<|"|>STRING<|"|>}},required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>'
)
SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "Plan\n"}
CALL = {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CALLED = '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'
CALLING = {"role": "assistant", "content": None, "reasoning": "look it up", "tool_calls": [CALL]}
SUNNY = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
ANSWERED = '<|tool_response>response:weather{value:<|"|>sunny<|"|>}<tool_response|>'


def render(*messages: dict[str, Any], tools: bool = False, think: bool = False, prompt: bool = True) -> Rendered:
    return render_gemma4(
        read_messages(messages),
        read_tools([WEATHER] if tools else []),
        enable_thinking=think,
        add_generation_prompt=prompt,
    )


def test_thinking_off_ends_in_an_empty_thought() -> None:
    assert render(USER).text == "<bos><|turn>user\nPlan<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"


def test_thinking_on_begins_the_system_turn() -> None:
    assert render(USER, think=True).text == (
        "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nPlan<turn|>\n<|turn>model\n"
    )


def test_system_message_and_tools_share_a_turn() -> None:
    assert render(SYSTEM, USER, tools=True, think=True).text.startswith(
        f"<bos><|turn>system\n<|think|>\nBe brief.{DECLARED}<turn|>\n<|turn>user\n"
    )


def test_boundaries_are_ends_of_the_system_turn_and_of_user_turns() -> None:
    rendered = render(SYSTEM, USER, {"role": "assistant", "content": "Yes."}, USER)
    system = "<bos><|turn>system\nBe brief.<turn|>\n"
    user = "<|turn>user\nPlan<turn|>\n"
    model = "<|turn>model\nYes.<turn|>\n"
    assert [rendered.text[:end] for end in rendered.boundaries] == [system, system + user, system + user + model + user]
    assert len(render(USER).boundaries) == 1


def test_after_a_tool_response_the_turn_goes_on_with_a_thought() -> None:
    start = f"<bos><|turn>system\n<|think|>\n{DECLARED}<turn|>\n<|turn>user\nPlan<turn|>\n<|turn>model\n"
    thought = "<|channel>thought\nlook it up\n<channel|>"
    assert render(USER, CALLING, SUNNY, tools=True, think=True).text == (
        f"{start}{thought}{CALLED}{ANSWERED}<|channel>thought\n"
    )
    assert render(USER, CALLING, SUNNY, tools=True).text.endswith(CALLED + ANSWERED)
    assert render(USER, CALLING, tools=True).text.endswith(CALLED + "<|tool_response>")


def test_the_answer_after_a_response_stays_in_the_turn() -> None:
    answer = {"role": "assistant", "content": "Sunny."}
    assert render(USER, CALLING, SUNNY, answer, prompt=False).text.endswith(f"{CALLED}{ANSWERED}Sunny.<turn|>\n")
    said_before = {**CALLING, "content": "I look."}
    assert render(USER, said_before, SUNNY, think=True).text.endswith(f"{ANSWERED}I look.<turn|>\n<|turn>model\n")


def test_earlier_thoughts_are_left_out() -> None:
    said = {"role": "assistant", "content": "<|channel>thought\nhm<channel|>Yes.", "reasoning": "hm"}
    text = render(USER, said, USER, CALLING, prompt=False).text
    assert "<|turn>model\nYes.<turn|>\n" in text
    assert text.count("<|channel>") == 1  # that of the call after the last user message
    assert "look it up" not in render(USER, CALLING, SUNNY, USER, prompt=False).text


def test_declarations_of_nested_schemas() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "when": {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]},
            "Units": {"type": ["string", "null"], "enum": ["C", "F"], "nullable": True, "minLength": 1},
            "places": {"type": "array", "items": {"type": "string"}},
        },
    }
    assert declaration(Tool("f", "", parameters)) == (
        'declaration:f{description:<|"|><|"|>,parameters:{properties:{'
        'places:{items:{type:<|"|>STRING<|"|>},type:<|"|>ARRAY<|"|>},'
        'Units:{enum:[<|"|>C<|"|>,<|"|>F<|"|>],nullable:true,type:[<|"|>STRING<|"|>,<|"|>NULL<|"|>]},'
        'when:{properties:{day:{type:<|"|>INTEGER<|"|>}},required:[<|"|>day<|"|>],type:<|"|>OBJECT<|"|>}},'
        'type:<|"|>OBJECT<|"|>}}'
    )
    assert declaration(Tool("f", "d")) == 'declaration:f{description:<|"|>d<|"|>}'
