"""Prompts of an exact length. Seen red: the template left out of the count, the first cut taken whatever its length."""

from __future__ import annotations

import pytest

from outrider.benchmarking.prompt_length import sized_prompts
from outrider.errors import ConfigError

PROMPTS = ["one two three", "four five", "six"]


def words(text: str) -> int:
    """A tokenizer that merges all letters of a word, with a template of three tokens."""
    return len(text.split()) + 3


def size(num_tokens: int, *, max_tokens: int = 1, context_length: int | None = None) -> tuple[str, ...]:
    return sized_prompts(
        PROMPTS, num_tokens=num_tokens, max_tokens=max_tokens, count=words, context_length=context_length
    )


@pytest.mark.parametrize("num_tokens", [4, 5, 7, 9, 40, 300])
def test_shortened_or_lengthened_to_the_token(num_tokens: int) -> None:
    found = size(num_tokens)
    assert [words(text) for text in found] == [num_tokens] * 3
    assert all(text.startswith(prompt[0]) for text, prompt in zip(found, PROMPTS, strict=True))
    assert len(set(found)) == 3


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="32 tokens and an answer of 8 do not fit into a context of 32"):
        size(32, max_tokens=8, context_length=32)
    assert len(size(24, max_tokens=8, context_length=32)) == 3
    with pytest.raises(ConfigError, match="has 4 tokens, template included"):
        size(3)
    with pytest.raises(ConfigError, match="no cut of 'one two three' has 5 tokens"):
        sized_prompts(PROMPTS, num_tokens=5, max_tokens=1, count=lambda text: 2 * len(text.split()))
