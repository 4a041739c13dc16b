"""Speed means nothing where the answer is broken or the settings were others than those asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from outrider import metrics
from outrider.benchmarking.workloads import split_units

Flag = Literal["empty", "loop"]

LOOP_SHARE = 0.5
"""An answer repeats itself if at least this share of its runs of four words occurred in it before."""
MIN_LOOP_WORDS = 16  # fewer say nothing: a refrain is no loop
MAX_SAME_LINES = 5
"""The same line so often in a row is a loop."""
VARIETY_WORDS, MIN_VARIETY = 200, 0.3
"""Different words of the first so many, as a share: below, a text goes round in circles."""
MAX_PHRASE_SHARE = 0.2
PHRASE_WORDS = 8
"""Most of a text may not be one run of so many words."""
MARKUP = ("<|tool_call", "<tool_call", "<|channel", "<channel|", "<|turn", "<turn|", "<start_of_turn>", "<end_of_turn>")
"""Belongs to a chat's form and never into an answer's text."""


def quality_flag(text: str, tool_calls: Sequence[Mapping[str, Any]] = ()) -> Flag | None:
    """'empty' for no text and no tool call, 'loop' for a text that mostly repeats itself, None for a sound one."""
    if not text.strip():
        return None if tool_calls else "empty"
    words = split_units(text)
    if len(words) < MIN_LOOP_WORDS:
        return None
    return "loop" if metrics.repeated_share(words) >= LOOP_SHARE else None


def text_faults(text: str) -> list[str]:
    """What a broken model or cache does to one long text: what `quality_flag` finds in any answer, and more.

    Markup, one line again and again, few different words, one phrase too often; for people, empty for a sound text.
    """
    words = split_units(text)
    if not words:
        return ["the text is empty"]
    faults = [f"markup in prose: {mark!r}" for mark in MARKUP if mark in text]
    if quality_flag(text) == "loop":
        faults.append("it mostly repeats itself")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(len(set(lines[at : at + MAX_SAME_LINES])) == 1 for at in range(len(lines) - MAX_SAME_LINES + 1)):
        faults.append(f"one line stands {MAX_SAME_LINES} times in a row")
    first = words[:VARIETY_WORDS]
    variety = len(set(first)) / len(first)
    if len(first) >= VARIETY_WORDS / 4 and variety < MIN_VARIETY:
        faults.append(f"only {100 * variety:.0f} % of the first {len(first)} words are different ones")
    phrases = Counter(tuple(words[at : at + PHRASE_WORDS]) for at in range(len(words) - PHRASE_WORDS + 1))
    phrase, count = phrases.most_common(1)[0] if phrases else ((), 0)
    if count > 2 and count * PHRASE_WORDS > MAX_PHRASE_SHARE * len(words):
        faults.append(f"the phrase {' '.join(phrase)!r} stands there {count} times")
    return faults


def setting_faults(asked: Mapping[str, Any], echoed: Mapping[str, Any]) -> list[str]:
    """What a server says of a setting and is not what was asked; settings on one side only are not judged."""
    return [
        f"{name} was asked to be {asked[name]!r}, but the server says {echoed[name]!r}"
        for name in asked
        if name in echoed and asked[name] is not None and asked[name] != echoed[name]
    ]
