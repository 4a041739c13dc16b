"""Plain text of any length, to make prompts long: the log of a lock keeper, never the same twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.benchmarking.request_sets import Item

_CALIBRATION_ENTRIES = 8
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

    `count` asks the server. An entry is weighed by a first try, so that it ends within two entries or 3 %.
    ConfigError for an item that is longer to begin with.
    """
    num_bare = count(item)
    if num_bare > num_tokens:
        raise ConfigError(f"a prompt has {num_bare} tokens as it is; give a context length of at least that.")
    entry_tokens = max(1.0, (count(padded(item, _CALIBRATION_ENTRIES, seed=seed)) - num_bare) / _CALIBRATION_ENTRIES)
    num_entries = int((num_tokens - num_bare) / entry_tokens)
    while num_entries > 0:
        tried = padded(item, num_entries, seed=seed)
        num_over = count(tried) - num_tokens
        if num_over <= 0:
            return tried
        num_entries -= max(1, int(num_over / entry_tokens))
    return item
