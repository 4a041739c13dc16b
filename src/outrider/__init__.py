"""Outrider: lossless block-diffusion speculative decoding for Gemma models.

Names load on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.backends.local import LLM, load
    from outrider.core import AcceptanceStats, Chunk, Generation, Grammar, SamplingParams, TokenLogprobs
    from outrider.engine.engine import EngineConfig

__all__ = [
    "LLM",
    "AcceptanceStats",
    "Chunk",
    "EngineConfig",
    "Generation",
    "Grammar",
    "SamplingParams",
    "TokenLogprobs",
    "load",
]

_HOMES = {
    "LLM": "outrider.backends.local",
    "load": "outrider.backends.local",
    "EngineConfig": "outrider.engine.engine",
    "AcceptanceStats": "outrider.core",
    "Chunk": "outrider.core",
    "Generation": "outrider.core",
    "Grammar": "outrider.core",
    "SamplingParams": "outrider.core",
    "TokenLogprobs": "outrider.core",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
