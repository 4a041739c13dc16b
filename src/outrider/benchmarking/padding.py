"""Plain text of any length, to make prompts long: the log of a lock keeper, never the same twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import floor
from typing import TYPE_CHECKING

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.benchmarking.request_sets import Item

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
    if item.prompt is not None:
        return replace(item, prompt=text + item.prompt)
    place = next((at for at, each in enumerate(item.messages) if each["role"] == "user"), len(item.messages) - 1)
    said = item.messages[place]
    longer = {**said, "content": f"{text}The log ends here. Now to something else.\n\n{said['content']}"}
    return replace(item, messages=(*item.messages[:place], longer, *item.messages[place + 1 :]))


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
