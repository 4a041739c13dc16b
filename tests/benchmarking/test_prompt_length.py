"""Prompts of an exact length. Seen red: the template left out of the count, the first cut taken whatever its length."""

from __future__ import annotations

import pytest

from outrider.benchmarking.prompt_length import log_entries, pad_to, padded, sized_items
from outrider.benchmarking.request_sets import Item
from outrider.errors import ConfigError, EngineFault

PROMPTS = [Item(prompt=text) for text in ("one two three", "four five", "six")]
CHAT = Item(messages=({"role": "system", "content": "be kind"}, {"role": "user", "content": "why?"}))


def num_words(item: Item) -> int:
    """A tokenizer that merges all letters of a word."""
    text = item.prompt or " ".join(each["content"] for each in item.messages)
    return len(text.split())


def in_template(item: Item) -> int:
    """The same with a template of three tokens."""
    return num_words(item) + 3


def size(num_tokens: int, *, max_tokens: int = 1, context_length: int | None = None) -> tuple[Item, ...]:
    return sized_items(
        PROMPTS, num_tokens=num_tokens, max_tokens=max_tokens, count=in_template, context_length=context_length
    )


@pytest.mark.parametrize("num_tokens", [4, 5, 7, 9, 40, 300])
def test_shortened_or_lengthened_to_the_token(num_tokens: int) -> None:
    found = size(num_tokens)
    assert [in_template(item) for item in found] == [num_tokens] * 3
    assert [(item.prompt or "")[0] for item in found] == ["o", "f", "s"]
    assert len({item.prompt for item in found}) == 3


def test_of_a_chat_the_users_first_words_grow_or_shrink() -> None:
    (found,) = sized_items([CHAT], num_tokens=9, max_tokens=1, count=num_words)
    assert found.messages[0] == CHAT.messages[0]
    assert num_words(found) == 9
    assert str(found.messages[1]["content"]).split()[:6] == ["why?"] * 6


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="32 tokens and an answer of 8 do not fit into a context of 32"):
        size(32, max_tokens=8, context_length=32)
    assert len(size(24, max_tokens=8, context_length=32)) == 3
    with pytest.raises(ConfigError, match="has 4 tokens, template included"):
        size(3)
    with pytest.raises(ConfigError, match="no cut of 'one two three' has 5 tokens"):
        sized_items(PROMPTS, num_tokens=5, max_tokens=1, count=lambda item: 2 * num_words(item))


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
    num_found = num_words(pad_to(item, num_tokens, seed=1, count=num_words))
    assert min(num_tokens - 45, 0.97 * num_tokens) < num_found <= num_tokens


def test_a_length_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 tokens as it is"):
        pad_to(CHAT, 2, seed=1, count=num_words)
    assert pad_to(CHAT, 3, seed=1, count=num_words) == CHAT


def test_a_count_that_does_not_grow_is_a_fault_of_the_server() -> None:
    with pytest.raises(EngineFault, match=r"1 tokens are counted in \d+ characters"):
        sized_items([Item(prompt="x")], num_tokens=32, max_tokens=1, count=lambda _: 1)
