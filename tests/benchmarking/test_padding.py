from __future__ import annotations

import pytest

from outrider.benchmarking.padding import log_entries, pad_to, padded
from outrider.benchmarking.request_sets import Item
from outrider.errors import ConfigError

CHAT = Item(messages=({"role": "system", "content": "be kind"}, {"role": "user", "content": "why?"}))


def words(item: Item) -> int:
    text = item.prompt or " ".join(each["content"] for each in item.messages)
    return len(text.split())


def test_text_is_of_its_seed_and_length() -> None:
    assert log_entries(30, seed=1) == log_entries(30, seed=1) != log_entries(30, seed=2)
    assert log_entries(30, seed=1).count("\n") == 29


def test_the_log_comes_before_the_question() -> None:
    found = padded(CHAT, 3, seed=1)
    assert found.messages[0] == CHAT.messages[0]
    assert found.messages[1]["content"].endswith("\n\nwhy?")
    assert "Entry 3" in found.messages[1]["content"]
    assert (padded(Item(prompt="x"), 2, seed=1).prompt or "").endswith("x")
    assert padded(CHAT, 0, seed=1) == CHAT


@pytest.mark.parametrize("num_tokens", [60, 200, 1000, 4000])
@pytest.mark.parametrize("item", [CHAT, Item(prompt="go on")])
def test_lengths_are_met_and_never_exceeded(item: Item, num_tokens: int) -> None:
    num_found = words(pad_to(item, num_tokens, seed=1, count=words))
    assert min(num_tokens - 45, 0.97 * num_tokens) < num_found <= num_tokens


def test_a_length_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 tokens as it is"):
        pad_to(CHAT, 2, seed=1, count=words)
    assert pad_to(CHAT, 3, seed=1, count=words) == CHAT
