from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.benchmarking.request_sets import SHIPPED, Item, RequestSet, load_request_set
from outrider.benchmarking.workloads import DEMO
from outrider.errors import ConfigError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def written(folder: Path, *lines: Any) -> str:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sets_are_whole(name: str) -> None:
    found = load_request_set(name)
    asked = [each.messages[-1]["content"] for each in found.items]
    assert len(set(asked)) == 16
    assert all(each.messages[-1]["role"] == "user" for each in found.items)
    assert (name == "tools") == bool(found.items[0].tools)
    assert len(found.workload.sha256) == 64
    assert found.workload.sha256 == load_request_set(name).workload.sha256


def test_hashes_differ_and_follow_the_content() -> None:
    hashes = {load_request_set(name).workload.sha256 for name in SHIPPED}
    assert len(hashes) == len(SHIPPED)
    items = load_request_set("chat").items
    assert RequestSet("chat", items[1:]).workload.sha256 not in hashes


def test_the_long_context_is_long() -> None:
    assert all(9_000 < len(each.messages[0]["content"]) < 20_000 for each in load_request_set("long-context").items)


def test_prompts_of_base_models_keep_their_hash() -> None:
    found = load_request_set("demo")
    assert found.items[0].prompt == DEMO.prompts[0]
    assert found.workload.sha256 == DEMO.sha256


def test_the_three_shapes_of_files(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "old answer"}
    name = written(
        tmp_path,
        {"messages": [*CHAT["messages"], answer], "tools": [{"type": "function"}], "max_tokens": 9},
        {"conversations": [{"from": "system", "value": "be kind"}, {"from": "human", "value": "q"}, {"from": "gpt"}]},
        "",
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
    )
    found = load_request_set(name)
    openai, sharegpt, spec_bench = found.items
    assert found.name == "mine"
    assert (openai.messages, openai.max_tokens, len(openai.tools)) == (tuple(CHAT["messages"]), 9, 1)
    assert [each["role"] for each in sharegpt.messages] == ["system", "user"]
    assert spec_bench.messages == ({"role": "user", "content": "first"},)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1]", "line 2: has none of messages, conversations, turns"),
        ({"text": "x"}, "line 2: has none of"),
        ({"messages": []}, "line 2: messages have nothing"),
        ({"messages": [{"content": "x"}]}, "line 2: 'role'"),
        ({"messages": [{"role": "user", "content": [1]}]}, "line 2: a message needs"),
        ({**CHAT, "max_tokens": 0}, "line 2: max_tokens 0"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "line 2: a turn from 'gpt'"),
        ({"conversations": []}, "line 2: conversations have no human"),
        ({"turns": []}, "line 2: "),
        ({"turns": [3]}, "line 2: turns must be texts"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_request_set(written(tmp_path, CHAT, line))


def test_no_such_set_and_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of narrative"):
        load_request_set("nope")
    with pytest.raises(ConfigError, match="no lines"):
        load_request_set(written(tmp_path, ""))


def test_a_salt_comes_first() -> None:
    system = {"role": "system", "content": "be kind"}
    item = Item(messages=(system, CHAT["messages"][0]))
    assert item.salted("k3").messages[0]["content"] == "k3\nbe kind"
    assert item.salted("k3").messages[1:] == item.messages[1:]
    assert Item(prompt="x").salted("k3").prompt == "k3\nx"


def test_files_are_utf8_and_their_lines_end_with_lf_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes('\ufeff{"turns": ["a\u2028b"]}\r\n'.encode())
    assert load_request_set(str(path)).items[0].messages[0]["content"] == "a\u2028b"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        load_request_set(str(path))
