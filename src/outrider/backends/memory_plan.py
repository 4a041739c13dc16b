"""Does it fit? Weights, logits and caches against the memory there is, before caches are allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch

from outrider.backends.account import account_caches, held_bytes
from outrider.engine.engine import EngineConfig
from outrider.errors import ConfigError
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget

USABLE = 0.9  # of what is free: allocators, buffers of a pass and other programs take the rest


@dataclass(frozen=True)
class MemoryPlan:
    """Who gets which part of the memory there is, in bytes."""

    available_bytes: int
    parts: Mapping[str, int]
    """All but the target's keys and values."""
    cache_bytes: int
    """The target's keys and values, cached prefixes included."""
    needed_cache_bytes: int
    """What `max_seats` whole contexts take of it; the rest keeps prefixes."""

    @property
    def most_cache_bytes(self) -> int:
        """What `cache_bytes` could be at most."""
        return self.available_bytes - sum(self.parts.values())

    def lines(self) -> list[str]:
        """A table to print."""
        rows = {
            **self.parts,
            "keys and values": self.cache_bytes,
            "  of them for prefixes": max(0, self.cache_bytes - self.needed_cache_bytes),
            "left over": self.most_cache_bytes - self.cache_bytes,
            "usable": self.available_bytes,
        }
        return [f"{name:<24}{num_bytes / 2**20:>12,.1f} MiB" for name, num_bytes in rows.items()]


def plan_memory(
    *,
    available_bytes: int,
    target_bytes: int,
    drafter_bytes: int,
    drafter_context_bytes: int,
    bytes_per_seat: int,
    max_seats: int,
    max_draft_length: int,
    vocab_size: int,
    context_length: int,
    cache_bytes: int | None = None,
) -> MemoryPlan:
    """Share out memory: weights, the drafter's context, logits of the largest cycle, and keys and values.

    `bytes_per_seat` is the target's keys and values of one whole context, `drafter_context_bytes` that of all seats.
    Logits are float32: max_seats × (max_draft_length + 1) × vocab_size × 4 bytes. `cache_bytes` None takes what
    `max_seats` whole contexts need. ConfigError names the setting that does not fit.
    """
    parts = {
        "target": target_bytes,
        "drafter": drafter_bytes,
        "drafter context": drafter_context_bytes,
        "logits of a cycle": max_seats * (max_draft_length + 1) * vocab_size * 4,
    }
    needed = max_seats * bytes_per_seat
    plan = MemoryPlan(available_bytes, parts, needed if cache_bytes is None else cache_bytes, needed)
    if plan.most_cache_bytes < bytes_per_seat:
        _refuse(f"context_length={context_length}", plan, bytes_per_seat, "Lower context_length or max_seats.")
    if plan.cache_bytes > plan.most_cache_bytes:
        asked = f"max_seats={max_seats}" if cache_bytes is None else f"cache_bytes={cache_bytes}"
        _refuse(asked, plan, plan.cache_bytes, f"Lower {asked.partition('=')[0]} or context_length={context_length}.")
    if plan.cache_bytes < bytes_per_seat:
        raise ConfigError(
            f"cache_bytes={cache_bytes} is less than the {bytes_per_seat:,} bytes of one request with "
            f"context_length={context_length}. Raise cache_bytes, or lower context_length."
        )
    return plan


def _refuse(what: str, plan: MemoryPlan, num_bytes: int, advice: str) -> None:
    left = max(0, plan.most_cache_bytes)
    raise ConfigError(
        f"{what} does not fit: keys and values would take {num_bytes:,} bytes, and beside weights, drafter and logits "
        f"there are {left:,}. {advice}"
    )


def plan_engine_memory(
    model: GemmaTarget, drafter: DFlashDrafter | None, config: EngineConfig, *, available_bytes: int
) -> MemoryPlan:
    """The plan for models that are loaded already; `available_bytes` is what they left."""
    target_bytes, both_bytes = held_bytes(model), held_bytes(model, drafter) if drafter else held_bytes(model)
    sizes = [
        account_caches(layers, context_length=config.context_length, dtype=model.dtype)["cache_bytes"]
        for layers in (model.config.layers, drafter.config.layers if drafter else ())
    ]
    return plan_memory(
        available_bytes=available_bytes + both_bytes,
        target_bytes=target_bytes,
        drafter_bytes=both_bytes - target_bytes,
        drafter_context_bytes=sizes[1] * config.max_seats,
        bytes_per_seat=sizes[0],
        max_seats=config.max_seats,
        max_draft_length=drafter.config.max_draft_length if drafter else 0,
        vocab_size=model.config.vocab_size,
        context_length=config.context_length,
        cache_bytes=config.cache_bytes,
    )


def usable_bytes(device: torch.device) -> int:
    """Memory that is free on a device now, less a reserve."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free * USABLE)
