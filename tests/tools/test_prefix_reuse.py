"""T-016 through the server's template: hit and miss in four situations of a chat, on a toy target and its drafter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.core import AcceptanceStats
from outrider.engine import kv_cache as kv_cache_module
from outrider.engine.engine import Engine
from tests.byte_tokenizer import byte_tokenizer
from tests.paged import PAGE_SIZE, paged_engine
from tests.toy import toy_drafter, toy_target
from tools import prefix_reuse
from tools.prefix_reuse import Run, Situation, compare, kv_cache_of, make_situations, table

CONTEXT_LENGTH, NUM_TOKENS = 320, 8
SITUATIONS = ("same system prompt and tools", "second turn, thinking on", "second turn, thinking off", "branch inside")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A toy with a window of 8 on pages of 4, which keeps no page of it but the last few before a boundary."""
    monkeypatch.setattr(kv_cache_module, "WINDOW_SLACK_TOKENS", PAGE_SIZE)
    monkeypatch.setattr(prefix_reuse, "NUM_REPEATS", 1)
    monkeypatch.setattr(prefix_reuse, "SYSTEM", "Be")
    monkeypatch.setattr(prefix_reuse, "TOOLS", [prefix_reuse.tool("f", "")])
    monkeypatch.setattr(prefix_reuse, "NUMBERS", "1")
    target = toy_target(vocab_size=264, context_length=CONTEXT_LENGTH)
    drafter = toy_drafter(target, window=6, context_length=CONTEXT_LENGTH, mask_token_id=263)
    return paged_engine(target, drafter, context_length=CONTEXT_LENGTH, prefill_rows=64)[0]


def situation(name: str) -> Situation:
    return next(each for each in make_situations(byte_tokenizer()) if each.name.startswith(name))


@pytest.mark.parametrize("name", SITUATIONS)
def test_t016_hit_and_miss_in_a_chat(engine: Engine, name: str) -> None:
    asked = situation(name)
    found = compare(engine, byte_tokenizer(), asked, num_tokens=NUM_TOKENS)
    assert found.holds
    branch = len(asked.first.token_ids) + NUM_TOKENS // 2
    ends = {"same": asked.first.boundaries[0], "second": asked.first.boundaries[-1], "branch": branch}
    assert found.num_cached_tokens >= ends[name.split()[0].rstrip(",")] // PAGE_SIZE * PAGE_SIZE
    assert found.acceptance_length_cold == found.acceptance_length_hit is not None
    kv_cache_of(engine).assert_consistent()


def test_a_second_turn_does_not_repeat_the_thought() -> None:
    """So its prompt parts from the first text where the first prompt ended."""
    asked = situation("second turn, thinking on")
    answer = byte_tokenizer().encode("abcdefghij")[1:]
    text = byte_tokenizer().decode(asked.second(answer).token_ids)
    assert "abcde" not in text
    assert "<|turn>model\nfghij<turn|>" in text
    assert "<|think|>" in text
    text = byte_tokenizer().decode(situation("second turn, thinking off").second(answer).token_ids)
    assert "<|turn>model\nabcdefghij<turn|>" in text
    assert "<|think|>" not in text


def test_without_boundaries_another_user_message_is_a_miss(engine: Engine) -> None:
    """What the server's boundaries are for."""
    asked = situation("same system prompt and tools")
    asked = replace(asked, first=replace(asked.first, boundaries=()))
    found = compare(engine, byte_tokenizer(), asked, num_tokens=NUM_TOKENS)
    assert (found.num_cached_tokens, found.is_text_equal, found.holds) == (0, True, False)


RUN = Run(num_cached_tokens=16, token_ids=(1, 2), accepted=(1,), acceptance=AcceptanceStats(1, 4, 1), prefill_s=1.0)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"num_cached_tokens": 0}, False),
        ({"token_ids": (1, 3)}, False),
        ({"accepted": (0,)}, False),
        ({"acceptance": AcceptanceStats(1, 4, 2)}, False),
    ],
)
def test_whatever_a_hit_changes_is_noticed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], holds: bool
) -> None:
    monkeypatch.setattr(prefix_reuse, "NUM_REPEATS", 2)
    runs = iter([RUN, RUN, RUN, RUN, replace(RUN, prefill_s=0.5, **changes), RUN])  # first, hit, cold; twice
    monkeypatch.setattr(prefix_reuse, "run", lambda *_, **__: next(runs))
    found = compare(engine, byte_tokenizer(), situation("branch inside"), num_tokens=2)
    assert (found.holds, found.prefill_hit_s, found.prefill_cold_s) == (holds, 0.5, 1.0)
    lines = table([found, replace(found, is_text_equal=False, acceptance_length_hit=None)]).splitlines()
    assert " NO " in lines[2]
    assert len({len(line) for line in lines}) == 1
