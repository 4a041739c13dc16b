"""Speed means nothing where the answer is broken or the settings were others than those asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from outrider import metrics
from outrider.benchmarking.workloads import split_units

Flag = Literal["empty", "loop"]

LOOP_SHARE = 0.5
"""An answer repeats itself if at least this share of its runs of four words occurred in it before."""
MIN_LOOP_WORDS = 16  # fewer say nothing: a refrain is no loop


def quality_flag(text: str, tool_calls: Sequence[Mapping[str, Any]] = ()) -> Flag | None:
    """'empty' for no text and no tool call, 'loop' for a text that mostly repeats itself, None for a sound one."""
    if not text.strip():
        return None if tool_calls else "empty"
    words = split_units(text)
    if len(words) < MIN_LOOP_WORDS:
        return None
    return "loop" if metrics.repeated_share(words) >= LOOP_SHARE else None


def setting_faults(asked: Mapping[str, Any], echoed: Mapping[str, Any]) -> list[str]:
    """What a server says of a setting and is not what was asked; settings on one side only are not judged."""
    return [
        f"{name} was asked to be {asked[name]!r}, but the server says {echoed[name]!r}"
        for name in asked
        if name in echoed and asked[name] is not None and asked[name] != echoed[name]
    ]
