"""Prompts of an exact length, counted by whoever will read them: characters ÷ 4 is a guess."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from outrider.errors import ConfigError

REACH = 16  # characters around the first cut that is long enough; a tokenizer may merge across any one of them
JOINT = "\n\n"


def sized_prompts(
    prompts: Sequence[str],
    *,
    num_tokens: int,
    max_tokens: int,
    count: Callable[[str], int],
    context_length: int | None = None,
) -> tuple[str, ...]:
    """Each prompt cut, or continued with the ones after it, to exactly `num_tokens` by `count`, template included.

    ConfigError where prompt and answer cannot fit into the context, or where no cut has this length.
    """
    if context_length is not None and num_tokens + max_tokens > context_length:
        raise ConfigError(
            f"a prompt of {num_tokens} tokens and an answer of {max_tokens} do not fit into a context of "
            f"{context_length}. Lower one of them."
        )
    return tuple(
        _sized([*prompts[index:], *prompts[:index]], num_tokens, count, cache={}) for index in range(len(prompts))
    )


def _sized(prompts: Sequence[str], num_tokens: int, count: Callable[[str], int], *, cache: dict[int, int]) -> str:
    source = JOINT.join(prompts)
    while len(source) < num_tokens:  # a token is a character or more, or the template's
        source += JOINT + source

    def length(num_characters: int) -> int:
        if num_characters not in cache:
            cache[num_characters] = count(source[:num_characters])
        return cache[num_characters]

    if length(1) > num_tokens:
        raise ConfigError(
            f"a prompt of one character has {length(1)} tokens, template included. Ask for more than {num_tokens}."
        )
    while length(len(source)) < num_tokens:
        source += JOINT + source
        cache.clear()
    found = bisect_left(range(len(source) + 1), num_tokens, lo=1, key=length)
    for cut in sorted(range(max(1, found - REACH), min(len(source), found + REACH) + 1), key=lambda k: abs(k - found)):
        if length(cut) == num_tokens:
            return source[:cut]
    raise ConfigError(f"no cut of {prompts[0]!r:.40} has {num_tokens} tokens. Ask for one token more or less.")
