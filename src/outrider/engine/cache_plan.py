"""How many pages each group of layers gets out of a memory budget, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.errors import ConfigError
from outrider.models.config import LayerSpec

PAGE_SIZE = 16  # positions
WINDOW_SLACK_TOKENS = 256  # kept before a boundary beside the window, so that prefixes a little shorter are hits too


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """One group: layers of one model with the same window, which share a page table."""

    owner: str
    """"target" or "drafter"."""
    window: int | None
    page_bytes: int
    """Of a page of all layers together."""
    width: int
    """Columns W of the page table: pages a seat can hold at the same time."""
    num_pages: int
    max_cached_pages: int
    """Most pages kept for later prompts while no request holds them."""

    @property
    def num_bytes(self) -> int:
        """Of the whole pool."""
        return self.num_pages * self.page_bytes


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """All groups of an engine."""

    page_size: int
    num_seats: int
    groups: tuple[GroupPlan, ...]

    @property
    def num_bytes(self) -> int:
        """Of all pools."""
        return sum(group.num_bytes for group in self.groups)

    def describe(self) -> list[str]:
        """A line a group and one for the sum, to print before allocating."""
        lines = []
        for group in self.groups:
            sees = "full attention" if group.window is None else f"window {group.window}"
            lines.append(
                f"{group.owner}, {sees}: {group.num_pages} pages of {self.page_size} tokens, {_mib(group.num_bytes)}; "
                f"up to {_mib(group.max_cached_pages * group.page_bytes)} kept for later prompts"
            )
        return [*lines, f"caches of {self.num_seats} requests at a time: {_mib(self.num_bytes)}"]


def plan_pages(
    target_layers: Sequence[LayerSpec],
    drafter_layers: Sequence[LayerSpec],
    *,
    num_seats: int,
    context_length: int,
    max_rows: int,
    max_block_rows: int | None = None,
    dtype: torch.dtype,
    budget_bytes: int | None = None,
    max_cached_bytes: int | None = None,
    page_size: int = PAGE_SIZE,
) -> CachePlan:
    """Share a budget out among the groups; ConfigError if one request of full length would not fit.

    A pass has at most `max_rows` rows of the request whose prompt it runs, one at a time, and `max_block_rows` of any
    other; None is as many. The least is one whole context and every seat's windows. What is left goes to all groups
    alike: to the contexts of the other seats where layers see everything, to two kept windows a seat where they do not.
    Without a budget it is just that much; a larger one keeps more. `max_cached_bytes` bounds what is kept for later
    prompts; 0 keeps nothing.
    """
    demands = [
        demand
        for owner, layers in (("target", target_layers), ("drafter", drafter_layers))
        for demand in _demands(
            owner, layers, num_seats, context_length, (max_rows, max_block_rows or max_rows), dtype, page_size
        )
    ]
    least_bytes = sum(demand.page_bytes * demand.num_least for demand in demands)
    wished_bytes = sum(demand.page_bytes * demand.num_wished for demand in demands)
    budget = least_bytes + wished_bytes if budget_bytes is None else budget_bytes
    if budget < least_bytes:
        raise ConfigError(
            f"the caches have {_mib(budget)}, but context_length={context_length} with max_seats={num_seats} needs "
            f"{_mib(least_bytes)} for one request of full length and every seat's windows. Lower context_length or "
            "max_seats, or give the caches more memory."
        )
    share = (budget - least_bytes) / wished_bytes if wished_bytes else 0.0
    kept_share = 1.0 if max_cached_bytes is None else min(1.0, max_cached_bytes / max(budget, 1))
    groups = tuple(demand.granted(share, kept_share) for demand in demands)
    return CachePlan(page_size=page_size, num_seats=num_seats, groups=groups)


@dataclass(frozen=True)
class _Demand:
    """What a group cannot do without, and what it would have besides, in pages."""

    owner: str
    window: int | None
    page_bytes: int
    width: int
    num_least: int
    num_wished: int

    def granted(self, share: float, kept_share: float) -> GroupPlan:
        """The least and a share of the wished, some share of it all for later prompts."""
        num_pages = self.num_least + int(share * self.num_wished)
        return GroupPlan(
            owner=self.owner,
            window=self.window,
            page_bytes=self.page_bytes,
            width=self.width,
            num_pages=num_pages,
            max_cached_pages=int(kept_share * num_pages),
        )


def _demands(
    owner: str,
    layers: Sequence[LayerSpec],
    num_seats: int,
    context_length: int,
    rows: tuple[int, int],
    dtype: torch.dtype,
    page_size: int,
) -> list[_Demand]:
    """One a group of a model's layers; `rows` of a prompt's pass and of a cycle."""
    context_pages, demands = -(-context_length // page_size), []
    for window in windows_of(layers):
        page_bytes = page_size * _position_bytes(layers, window, dtype)
        if window is None:
            width, num_least, num_wished = context_pages, context_pages, (num_seats - 1) * context_pages
        else:
            # One page more than a window and a pass fill, since neither needs to start at a border.
            width, block_width = (min(context_pages, -(-(window + each) // page_size) + 1) for each in rows)
            num_kept = min(context_pages, -(-(window + WINDOW_SLACK_TOKENS) // page_size))
            num_least, num_wished = width + (num_seats - 1) * block_width, 2 * num_seats * num_kept
        demands.append(_Demand(owner, window, page_bytes, width, num_least, num_wished))
    return demands


def windows_of(layers: Sequence[LayerSpec]) -> list[int | None]:
    """The windows of layers that have a cache of their own, in the order of their first layers."""
    return list({spec.window: None for spec in layers if spec.cache_source is None})


def _position_bytes(layers: Sequence[LayerSpec], window: int | None, dtype: torch.dtype) -> int:
    """Keys and values of one position in all layers of a group."""
    numbers = sum(2 * s.num_kv_heads * s.head_dim for s in layers if s.cache_source is None and s.window == window)
    return numbers * dtype.itemsize


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
