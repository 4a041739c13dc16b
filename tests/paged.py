"""Toy engines on shared pages, drafter included."""

from __future__ import annotations

from typing import Any

from outrider.engine.cache_plan import plan_pages
from outrider.engine.cache_space import PagedSpace
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.kv_cache import KvCache
from outrider.engine.proposer import DFlashProposer
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget

PAGE_SIZE = 4


def paged_engine(
    target: GemmaTarget, drafter: DFlashDrafter | None, *, budget_bytes: int | None = None, **settings: Any
) -> tuple[Engine, KvCache]:
    """An engine with pages of four positions and prompts in chunks of eight rows, unless told otherwise."""
    config = EngineConfig(**{"context_length": 128, "prefill_rows": 8, **settings})
    layers = (target.config.layers, drafter.config.layers if drafter else ())
    plan = plan_pages(
        *layers,
        num_seats=config.max_seats,
        context_length=config.context_length,
        max_rows=config.max_rows,
        dtype=target.dtype,
        budget_bytes=budget_bytes,
        page_size=PAGE_SIZE,
    )
    kv_cache = KvCache.allocate(plan, *layers, dtype=target.dtype, device=target.device)
    proposer = DFlashProposer(drafter, kv_cache.drafter_caches) if drafter else None
    space = PagedSpace(kv_cache, context_length=config.context_length)
    return Engine(target, kv_cache.target_caches, proposer, None, config, frozenset(), space), kv_cache
