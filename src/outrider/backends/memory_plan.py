"""Does it fit? Weights, caches and what is computed in against the memory there is, before caches are allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from outrider.backends.account import held_bytes
from outrider.backends.pass_memory import pass_parts
from outrider.engine.cache_plan import PAGE_SIZE, CachePlan, plan_pages
from outrider.engine.engine import EngineConfig
from outrider.errors import ConfigError
from outrider.kernels.low_bit import LowBitMatrix
from outrider.kernels.matmul_sizes import device_limits
from outrider.models.config import LayerSpec
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget

USABLE = 0.9  # of what is free: allocators, loaded kernels, and other programs take the rest; a CPU's passes, too


@dataclass(frozen=True)
class MemoryPlan:
    """Who gets which part of the memory there is, in bytes."""

    available_bytes: int
    parts: Mapping[str, int]
    """All but the target's keys and values."""
    cache_bytes: int
    """The target's keys and values, cached prefixes included."""
    cache_lines: tuple[str, ...] = ()
    """How pages are shared out."""

    @property
    def most_cache_bytes(self) -> int:
        """What the target's keys and values could take at most."""
        return self.available_bytes - sum(self.parts.values())

    def lines(self) -> list[str]:
        """A table to print."""
        rows = {
            **self.parts,
            "keys and values": self.cache_bytes,
            "left over": self.most_cache_bytes - self.cache_bytes,
            "usable": self.available_bytes,
        }
        return [*(f"{name:<20}{num_bytes / 2**20:>12,.1f} MiB" for name, num_bytes in rows.items()), *self.cache_lines]


def plan_memory(
    *,
    available_bytes: int,
    target_bytes: int,
    drafter_bytes: int,
    drafter_context_bytes: int,
    cache_bytes: int,
    max_seats: int,
    max_draft_length: int,
    vocab_size: int,
    passes: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """Share out memory: weights, the drafter's context, logits of the largest cycle, and the target's keys and values.

    Logits are float32: max_seats × (max_draft_length + 1) × vocab_size × 4 bytes. `passes` are further parts, of what
    is computed in (`pass_parts`). Whether it all fits is for the caller
    to see: `most_cache_bytes` may be less than `cache_bytes`.
    """
    parts = {
        "target": target_bytes,
        "drafter": drafter_bytes,
        "drafter context": drafter_context_bytes,
        "logits of a cycle": max_seats * (max_draft_length + 1) * vocab_size * 4,
        **(passes or {}),
    }
    return MemoryPlan(available_bytes, parts, cache_bytes)


def plan_caches(
    target_layers: Sequence[LayerSpec], drafter_layers: Sequence[LayerSpec], config: EngineConfig, *, dtype: torch.dtype
) -> CachePlan:
    """Pages for an engine; ConfigError where `cache_bytes` is less than one request needs."""
    return plan_pages(
        target_layers,
        drafter_layers,
        num_seats=config.max_seats,
        context_length=config.context_length,
        max_rows=config.max_rows,
        max_block_rows=config.max_block_rows,
        dtype=dtype,
        budget_bytes=config.cache_bytes,
        page_size=config.page_size or PAGE_SIZE,
    )


def share_memory(
    model: GemmaTarget, drafter: DFlashDrafter | None, config: EngineConfig, *, available_bytes: int, on_gpu: bool
) -> MemoryPlan:
    """The plan for models that are loaded, whether it fits or not; `available_bytes` is what they left.

    `on_gpu` says that the kernels for CUDA are to run them: what passes compute in is planned for these alone.
    """
    target_bytes, both_bytes = held_bytes(model), held_bytes(model, drafter) if drafter else held_bytes(model)
    caches = plan_caches(model.config.layers, drafter.config.layers if drafter else (), config, dtype=model.dtype)
    drafter_context_bytes = sum(group.num_bytes for group in caches.groups if group.owner == "drafter")
    passes = None
    if on_gpu:
        passes = pass_parts(
            model.config,
            drafter.config if drafter else None,
            config,
            caches,
            limits=device_limits(model.device.index or 0),
            has_low_bits=drafter is not None and isinstance(drafter.fc, LowBitMatrix),
        )
    plan = plan_memory(
        available_bytes=available_bytes + both_bytes,
        target_bytes=target_bytes,
        drafter_bytes=both_bytes - target_bytes,
        drafter_context_bytes=drafter_context_bytes,
        cache_bytes=caches.num_bytes - drafter_context_bytes,
        max_seats=config.max_seats,
        max_draft_length=drafter.config.max_draft_length if drafter else 0,
        vocab_size=model.config.vocab_size,
        passes=passes,
    )
    return replace(plan, cache_lines=tuple(caches.describe()))


def plan_engine_memory(
    model: GemmaTarget, drafter: DFlashDrafter | None, config: EngineConfig, *, available_bytes: int
) -> MemoryPlan:
    """`share_memory`; ConfigError naming the settings to lower where the caches do not fit."""
    on_gpu = model.kernels.name == "gpu"
    plan = share_memory(model, drafter, config, available_bytes=available_bytes, on_gpu=on_gpu)
    if plan.cache_bytes > plan.most_cache_bytes:
        drafter_context_bytes = plan.parts["drafter context"]
        wished_bytes = plan.cache_bytes + drafter_context_bytes
        settings = {"cache_bytes": config.cache_bytes} if config.cache_bytes else {"max_seats": config.max_seats}
        settings["context_length"] = config.context_length
        named = " and ".join(f"{name}={value}" for name, value in settings.items())
        raise ConfigError(
            f"{named} do not fit: keys and values would take {wished_bytes:,} bytes, and beside the rest there "
            f"are {max(0, plan.most_cache_bytes + drafter_context_bytes):,}. Lower {' or '.join(settings)}."
        )
    return plan


def usable_bytes(device: torch.device) -> int:
    """Memory that is free on a device now, less a reserve."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free * USABLE)
