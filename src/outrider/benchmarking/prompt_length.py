"""Prompts of a length, counted by whoever will read them: characters ÷ 4 is a guess.

`sized_items` cuts or joins prompts to a number of tokens exactly; `pad_to` keeps a prompt whole and puts plain text
before it, the log of a lock keeper, never the same twice.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import floor
from typing import TYPE_CHECKING

from outrider.errors import ConfigError, EngineFault

if TYPE_CHECKING:
    from outrider.benchmarking.request_sets import Item

REACH = 16  # characters around the first cut that is long enough; a tokenizer may merge across any one of them
JOINT = "\n\n"
MAX_CHARACTERS_PER_TOKEN = 100  # of prose: a count that lies would never be reached
_FIRST_ENTRIES = 4  # few, since a short context must have room for them
_MAX_TRIES = 5
_PLACES = ("Northmere", "Alderby", "the upper lock", "Saltwick", "the mill", "Hexbridge", "the coal wharf", "Eastholm")
_CARGOES = ("timber", "barley", "slate", "wool", "coal", "cider", "bricks", "apples")
_WINDS = ("a light wind from the east", "no wind at all", "rain until noon", "fog on the water", "a hard frost")
_EVENTS = (
    "the gates were oiled",
    "a boy fell in and was pulled out",
    "the toll was paid in full",
    "two swans would not make way",
    "a letter came for the engineer",
    "the lamp had to be mended",
)


def log_entries(num_entries: int, *, seed: int) -> str:
    """So many entries of about thirty tokens each."""
    draw = random.Random(seed)
    return "\n".join(
        f"Entry {number}: {draw.randint(2, 60)} boats with {draw.choice(_CARGOES)} for {draw.choice(_PLACES)}, "
        f"{draw.choice(_WINDS)}; {draw.choice(_EVENTS)}. Water at {draw.randint(90, 240)} cm."
        for number in range(1, num_entries + 1)
    )


def padded(item: Item, num_entries: int, *, seed: int) -> Item:
    """The item with a log before what its user says first."""
    if num_entries < 1:
        return item
    text = f"Here is the log of a lock keeper.\n\n{log_entries(num_entries, seed=seed)}\n\n"
    if item.prompt is None:
        text += "The log ends here. Now to something else.\n\n"
    return _with_text(item, text + _text(item))


def pad_to(item: Item, num_tokens: int, *, seed: int, count: Callable[[Item], int]) -> Item:
    """The item with a log that brings its prompt to about `num_tokens` as the server counts them, never to more.

    `count` asks the server. Each try weighs an entry anew, so that a few tries end within two entries or 3 %.
    ConfigError for an item that is longer to begin with.
    """
    num_bare = count(item)
    if num_bare > num_tokens:
        raise ConfigError(f"a prompt has {num_bare} tokens as it is; give a context length of at least that.")
    entry_tokens = max(1.0, (count(padded(item, _FIRST_ENTRIES, seed=seed)) - num_bare) / _FIRST_ENTRIES)
    kept, num_entries, num_found = item, 0, num_bare
    for _ in range(_MAX_TRIES):
        num_more = floor((num_tokens - num_found) / entry_tokens)
        num_entries += num_more
        if num_more == 0 or num_entries < 1:
            break
        tried = padded(item, num_entries, seed=seed)
        num_found = count(tried)
        entry_tokens = max(1.0, (num_found - num_bare) / num_entries)
        if num_found <= num_tokens:
            kept = tried
    return kept


def sized_items(
    items: Sequence[Item],
    *,
    num_tokens: int,
    max_tokens: int,
    count: Callable[[Item], int],
    context_length: int | None = None,
) -> tuple[Item, ...]:
    """Each item cut, or continued with the ones after it, to exactly `num_tokens` by `count`, template included.

    Of a chat it is what the user says first that grows or shrinks. ConfigError where prompt and answer cannot fit into
    the context, or where no cut has this length; EngineFault for a count that does not grow with the text.
    """
    if context_length is not None and num_tokens + max_tokens > context_length:
        raise ConfigError(
            f"a prompt of {num_tokens} tokens and an answer of {max_tokens} do not fit into a context of "
            f"{context_length}. Lower one of them."
        )
    texts = [_text(item) for item in items]
    return tuple(
        _sized(item, JOINT.join([*texts[index:], *texts[:index]]), num_tokens, count)
        for index, item in enumerate(items)
    )


def _sized(item: Item, source: str, num_tokens: int, count: Callable[[Item], int]) -> Item:
    while len(source) < num_tokens:  # a token is a character or more, or the template's
        source += JOINT + source
    known = dict[int, int]()

    def length(num_characters: int) -> int:
        if num_characters not in known:
            known[num_characters] = count(_with_text(item, source[:num_characters]))
        return known[num_characters]

    if length(1) > num_tokens:
        raise ConfigError(
            f"a prompt of one character has {length(1)} tokens, template included. Ask for more than {num_tokens}."
        )
    while (num_found := length(len(source))) < num_tokens:
        if len(source) > MAX_CHARACTERS_PER_TOKEN * num_tokens:
            raise EngineFault(f"{num_found} tokens are counted in {len(source)} characters. No tokenizer does that.")
        source += JOINT + source
        known.clear()
    found = bisect_left(range(len(source) + 1), num_tokens, lo=1, key=length)
    for cut in sorted(range(max(1, found - REACH), min(len(source), found + REACH) + 1), key=lambda k: abs(k - found)):
        if length(cut) == num_tokens:
            return _with_text(item, source[:cut])
    raise ConfigError(f"no cut of {_text(item)!r:.40} has {num_tokens} tokens. Ask for one token more or less.")


def _text(item: Item) -> str:
    """What is to be continued, or what its user says first."""
    return item.prompt if item.prompt is not None else str(item.messages[_first_user(item)]["content"])


def _with_text(item: Item, text: str) -> Item:
    """The item with this in the place of that."""
    if item.prompt is not None:
        return replace(item, prompt=text)
    place = _first_user(item)
    said = {**item.messages[place], "content": text}
    return replace(item, messages=(*item.messages[:place], said, *item.messages[place + 1 :]))


def _first_user(item: Item) -> int:
    return next((at for at, each in enumerate(item.messages) if each["role"] == "user"), len(item.messages) - 1)
