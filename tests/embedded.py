"""The embedded default, loaded once for all tests that need it."""

from __future__ import annotations

import functools

import outrider


@functools.cache
def embedded_llm() -> outrider.LLM:
    """Gemma 3 270M with its shipped drafter, two seats."""
    return outrider.load(config=outrider.EngineConfig(max_seats=2, context_length=512))


@functools.cache
def plain_llm() -> outrider.LLM:
    """The same weights without a drafter."""
    return embedded_llm().without_drafter()
