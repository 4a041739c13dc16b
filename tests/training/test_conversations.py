from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.training.conversations import Conversation, read_conversations, read_row

USER, REPLY = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "content": "noon", "tool_call_id": "a"}
SYSTEM = {"role": "system", "content": "Be brief."}


def openai(*messages: dict[str, Any], **more: Any) -> str:
    return json.dumps({"messages": messages, **more})


def shape(conversation: Conversation) -> list[tuple[list[str], bool]]:
    return [([each["role"] for each in turn.given], turn.recorded_call is not None) for turn in conversation.turns]


@pytest.mark.parametrize(
    ("line", "turns"),
    [
        (openai(USER), [(["user"], False)]),
        (openai(SYSTEM, USER, REPLY), [(["system", "user"], False)]),  # its answer is not ours: we ask there
        (openai(USER, REPLY, USER), [(["user"], False), (["user"], False)]),
        (openai(USER, CALL, RESULT, RESULT, REPLY), [(["user"], True), (["tool", "tool"], False)]),
        (openai(USER, CALL, RESULT, REPLY, USER), [(["user"], True), (["tool"], False), (["user"], False)]),
        ('{"prompt": "Why?"}', [(["user"], False)]),
        ('{"turns": ["Why?", "And then?"]}', [(["user"], False), (["user"], False)]),
        (
            '{"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."},'
            ' {"from": "human", "value": "Now?"},'
            ' {"from": "function_call", "value": "{\\"name\\": \\"clock\\", \\"arguments\\": {}}"},'
            ' {"from": "observation", "value": "noon"}]}',
            [(["user"], False), (["user"], True), (["tool"], False)],
        ),
    ],
)
def test_an_answer_is_due_wherever_the_file_has_one_or_lacks_one(line: str, turns: list[Any]) -> None:
    assert shape(read_row(line)) == turns


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting"),
        ('{"text": "x"}', "has one of messages, conversations, turns, prompt"),
        (openai(USER, {"role": "assistant", "content": " "}), "message 1 is an empty assistant turn"),
        (openai(USER, {"role": "assistant", "content": None}, USER), "message 1 is an empty assistant turn"),
        (openai({"role": "user", "content": "\n"}), "message 0 of user is empty"),
        (openai(REPLY), "nobody has asked"),
        (openai(USER, REPLY, REPLY), "nobody has asked"),
        (openai(SYSTEM, REPLY), "nobody has asked"),
        (openai(USER, REPLY, SYSTEM), "only the first"),
        (openai(USER, RESULT), "no call comes before"),
        (openai(USER, REPLY, RESULT), "no call comes before"),
        (openai(USER, CALL, USER), "has no result"),
        (openai(SYSTEM), "nobody asks"),
        (openai({"role": "narrator", "content": "x"}), "'narrator'"),
        (openai({"content": "x"}), "KeyError"),
        (openai({"role": "user", "content": 7}), "is text, not 7"),
        (openai({"role": "user", "content": [{"type": "image_url"}]}), "parts that are not text"),
        (openai(USER, tools="clock"), "tools are a list"),
        ('{"prompt": "<|im_start|>user Why?"}', "spells <|im_start|>, so a chat template was applied"),
        ('{"prompt": "[INST] Why? [/INST]"}', "spells"),
        ('{"prompt": "a <unused7> b"}', "spells <unused7>"),
    ],
)
def test_what_would_poison_training_is_refused_and_says_why(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match="(?i)" + reason.replace("|", r"\|")):
        read_row(line, control_tokens=frozenset({"<unused7>"}))


def test_tags_of_other_languages_are_text() -> None:
    assert read_row('{"prompt": "What is <table> in vec<T>?"}').question == "What is <table> in vec<T>?"


def test_files_are_read_once_each_and_bad_rows_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    rows = ['{"prompt": "Why  not?", "category": "Code", "language": "english"}', "", '{"turns": ["why\\nNOT?"]}', "no"]
    rows += [openai(USER, {**REPLY, "content": ""}), openai(USER, REPLY, USER, {**REPLY, "content": ""})]
    path.write_text("\n".join([*rows, openai(USER, REPLY), openai(USER, {**REPLY, "content": "Other."})]))
    with pytest.raises(ConfigError, match=r"asked.jsonl, line 4: .*--drop-bad-rows"):
        read_conversations([path])
    found, dropped = read_conversations([path], on_bad_row="drop")
    assert [(each.question, each.domain, each.language) for each in found] == [
        ("Why  not?", "code", "english"),
        ("Why?", None, None),
    ]
    assert dropped == {
        "repeated prompt": 2,
        "bad row: Expecting value": 1,
        "bad row: a message is an empty assistant turn": 2,
    }
    assert read_row(openai(USER, CALL, RESULT)).key != read_row(openai(USER)).key
    assert read_row(openai(USER, tools=[{"a": 1}])).key != read_row(openai(USER)).key


def test_files_without_a_conversation_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no conversation is left"):
        read_conversations([path])
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_conversations([path])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_conversations([tmp_path / "none.jsonl"])
