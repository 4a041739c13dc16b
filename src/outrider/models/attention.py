"""Caches, spans and rotary tables: what every attention layer of every model needs to know about positions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.layer_cache import LayerCache
from outrider.models.config import LayerSpec, RopeSpec


class KeysValues(NamedTuple):
    """Keys and values of the rows of a pass, each [R, G, D]."""

    keys: Tensor
    values: Tensor


class LayerCaches(list[LayerCache]):
    """One LayerCache a layer, and what kernels recorded of passes over them: a recording holds their addresses."""

    def __init__(self, layers: Iterable[LayerCache] = ()) -> None:
        super().__init__(layers)
        self.recordings: dict[Hashable, Any] = {}


def num_cache_slots(window: int | None, *, context_length: int, max_rows: int) -> int:
    """Slots C of a layer: all positions for full attention, window + rows of one pass for a sliding window."""
    return context_length if window is None else min(context_length, window + max_rows)


def allocate_caches(
    layers: Sequence[LayerSpec],
    *,
    num_seats: int,
    context_length: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> LayerCaches:
    """One empty LayerCache a layer, every seat with a page of its own.

    `max_rows` is the most rows one request has in one pass. A layer with a `cache_source` gets that layer's own.
    Caches whose requests share pages are `engine.kv_cache`'s.
    """
    caches = LayerCaches()
    for spec in layers:
        if spec.cache_source is not None:
            caches.append(caches[spec.cache_source])
            continue
        slots = num_cache_slots(spec.window, context_length=context_length, max_rows=max_rows)
        shape = (num_seats, slots, spec.num_kv_heads, spec.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        caches.append(LayerCache.of_seats(keys, values)._replace(window=spec.window))
    return caches


def causal_spans(seats: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Spans (kernels.ops) of target rows, int32 [R, 5]: the row's own position and the window before it.

    seats and positions are int64 [R]; the rows' keys must be in the cache already.
    """
    ends = positions + 1
    starts = torch.zeros_like(ends) if window is None else (ends - window).clamp_min(0)
    nothing = torch.zeros_like(ends)
    return torch.stack([seats, starts, ends, nothing, nothing], dim=1).to(torch.int32)


class RopeTable(NamedTuple):
    """cos and sin, [P, D/2]."""

    cos: Tensor
    sin: Tensor


def rope_table(
    spec: RopeSpec, *, head_dim: int, num_positions: int, dtype: torch.dtype, device: torch.device | str
) -> RopeTable:
    """Rotary tables for positions 0 .. P-1, float32 (float64 for a float64 model); cos 1 where nothing turns."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    if torch.device(device).type == "meta":
        return RopeTable(*(torch.empty(num_positions, head_dim // 2, dtype=precise, device=device) for _ in range(2)))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(precise) / head_dim
    inv_freq = 1.0 / (spec.theta**exponents) / spec.factor
    inv_freq[int(spec.rotated * head_dim // 2) :] = 0.0
    angles = torch.arange(num_positions, dtype=torch.int64).to(precise)[:, None] * inv_freq[None, :]
    return RopeTable(angles.cos().to(device), angles.sin().to(device))


@dataclass(frozen=True)
class GivenRows:
    """Embeddings that some rows bring instead of a token's.

    They enter the first layer as they are, not scaled. What stands in a row that is not given is never read.
    """

    is_given: Tensor  # bool [R]
    embeddings: Tensor  # [R, N]

    def cut(self, start: int, num_rows: int) -> GivenRows:
        """The rows from `start` on; past the last row none is given."""
        is_given, embeddings = (each[start : start + num_rows] for each in (self.is_given, self.embeddings))
        num_spare = num_rows - len(is_given)
        return GivenRows(functional.pad(is_given, (0, num_spare)), functional.pad(embeddings, (0, 0, 0, num_spare)))


@dataclass(frozen=True)
class Rows:
    """The packed rows of one target pass; a spare row has seat -1 and position 0."""

    token_ids: Tensor  # int64 [R]
    seats: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]
    given: GivenRows | None = None  # None embeds every row from its id, as anchors and drafts always are
