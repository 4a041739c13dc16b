"""Keys and values of all requests, target's and drafter's, in pages: allocated as text grows, shared where it repeats.

Host bookkeeping only: a pass sees page tables, fixed tensors that are changed in place between passes. Positions are
appended; whole committed pages can be published under a hash of all text up to their end, and another request that
begins with the same text adopts them. They are never written again, so that nothing is copied.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.engine.cache_plan import WINDOW_SLACK_TOKENS, CachePlan, GroupPlan, windows_of
from outrider.engine.page_pool import PagePool
from outrider.kernels.layer_cache import LayerCache
from outrider.models.attention import LayerCaches
from outrider.models.config import LayerSpec

KEY_BYTES = 16


class PageTable:
    """A page table int32 [S, W], -1 where a seat has no page: the host writes it, a device reads its own copy.

    On a CPU both are one. On CUDA an entry of its own would cost a launch, so that all are copied before a pass.
    """

    def __init__(self, num_seats: int, width: int, device: torch.device | str) -> None:
        self.tensor = torch.full((num_seats, width), -1, dtype=torch.int32, device=device)
        self._is_cuda, self._is_stale = self.tensor.is_cuda, False
        self._host = torch.full_like(self.tensor, -1, device="cpu").pin_memory() if self._is_cuda else self.tensor
        self._entries = self._host.numpy()
        self._copied = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]

    def set(self, seat: int, column: int | slice, page: int) -> None:
        """Change entries; a device sees it from the next pass after `flush` on."""
        if self._copied is not None and not self._is_stale:
            self._copied.synchronize()  # the last copy may still be waiting for its turn
            self._is_stale = True
        self._entries[seat, column] = page

    def clear(self, seat: int) -> None:
        """A seat without pages."""
        self.set(seat, slice(None), -1)

    def flush(self) -> None:
        """Let passes launched from now on see what was set."""
        if self._copied is not None and self._is_stale:
            self.tensor.copy_(self._host, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self.tensor.device))
            self._is_stale = False


@dataclass
class PageGroup:
    """A pool, its page table, and each seat's pages by logical page (position // page size)."""

    plan: GroupPlan
    page_table: PageTable
    pool: PagePool
    pages: list[dict[int, int]]
    named: list[set[int]] = field(init=False)
    """Of each seat, the logical pages that it made findable itself; of layers with a window only."""

    def __post_init__(self) -> None:
        """Nothing is findable yet."""
        self.named = [set() for _ in self.pages]

    @property
    def table(self) -> Tensor:
        """What passes read, int32 [S, W]."""
        return self.page_table.tensor

    def first_visible(self, position: int, page_size: int) -> int:
        """First logical page that the row at `position` may see; a drafter's windows reach one further than a row's."""
        return 0 if self.plan.window is None else max(0, position - self.plan.window) // page_size

    def map(self, seat: int, logical: int, page: int) -> None:
        """Give a seat a page it holds already."""
        self.pages[seat][logical] = page
        self.page_table.set(seat, logical % self.plan.width, page)

    def drop(self, seat: int, logical: int) -> None:
        """Take a seat's page away."""
        self.page_table.set(seat, logical % self.plan.width, -1)
        self.pool.let_go(self.pages[seat].pop(logical))

    def is_kept(self, logical: int, boundaries: Sequence[int], page_size: int) -> bool:
        """True for a page that is worth finding: any that all rows see, else those shortly before a boundary."""
        if self.plan.window is None:
            return True
        end, reach = (logical + 1) * page_size, self.plan.window + WINDOW_SLACK_TOKENS
        return any(boundary - reach < end <= boundary for boundary in boundaries)

    def publish(self, seat: int, keys: Sequence[bytes], num_known: int, boundaries: Sequence[int], size: int) -> None:
        """Name what is worth finding of a seat's whole pages, the first `num_known` of which were offered before.

        An answer's end moves on: pages of a window that were named for where it was are forgotten, or a long answer
        would leave no room for anything else.
        """
        held, named = self.pages[seat], self.named[seat]
        for logical in range(num_known, len(keys)) if self.plan.window is None else sorted(held.keys() - named):
            if logical < len(keys) and self.is_kept(logical, boundaries, size):
                is_new = self.pool.name(held[logical], keys[logical])
                if is_new and self.plan.window is not None:
                    named.add(logical)
        for logical in [logical for logical in named if not self.is_kept(logical, boundaries, size)]:
            named.remove(logical)
            self.pool.forget(keys[logical])

    def holds_before(self, keys: Sequence[bytes], page_size: int) -> list[bool]:
        """For each n from 0 to len(keys): True if all pages that the row after n pages may see can be found."""
        holds, first_of_run = [True], 0
        for logical, key in enumerate(keys):
            if self.pool.find(key) is None:
                first_of_run = logical + 1
            holds.append(first_of_run <= self.first_visible((logical + 1) * page_size, page_size))
        return holds


@dataclass
class KvCache:
    """The caches of an engine. `target_caches` and `drafter_caches` are what models take; their tensors never move.

    A seat is empty until `adopt` or `reserve`, and after `release`. `token_ids` are always a seat's whole text so far;
    `salt` stands for what else its rows depend on: give a digest of the embeddings a prompt brings, the same each time.
    """

    plan: CachePlan
    target_caches: LayerCaches
    drafter_caches: LayerCaches
    groups: list[PageGroup]
    page_keys: list[list[bytes]] = field(init=False)  # of each seat's whole pages, as far as it was published
    _writable: list[range] = field(init=False)  # positions of each seat, as far as `reserve` said so last

    def __post_init__(self) -> None:
        """All seats are empty."""
        self.page_keys = [[] for _ in range(self.plan.num_seats)]
        self._writable = [range(0)] * self.plan.num_seats

    @staticmethod
    def allocate(
        plan: CachePlan,
        target_layers: Sequence[LayerSpec],
        drafter_layers: Sequence[LayerSpec],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KvCache:
        """Zeroed pools for the layers that `plan` was made for."""
        plans, groups = iter(plan.groups), list[PageGroup]()
        caches = list[LayerCaches]()
        for layers in (target_layers, drafter_layers):
            own = {window: _empty_group(next(plans), plan.num_seats, device) for window in windows_of(layers)}
            caches.append(_layer_caches(layers, own, plan.page_size, dtype, device))
            groups += own.values()
        target_caches, drafter_caches = caches
        return KvCache(plan, target_caches, drafter_caches, groups)

    @property
    def num_pages(self) -> int:
        """Pages of all groups."""
        return sum(group.pool.num_pages for group in self.groups)

    @property
    def num_free_pages(self) -> int:
        """Pages no seat holds, those kept for later prompts included."""
        return sum(group.pool.num_free for group in self.groups)

    @property
    def num_cached_pages(self) -> int:
        """Free pages that a later prompt may find."""
        return sum(group.pool.num_cached for group in self.groups)

    def has_room(self, seat: int, num_positions: int) -> bool:
        """True if free pages suffice for the seat to grow to so many positions, with windows of its whole ring."""
        num_pages = -(-num_positions // self.plan.page_size)
        return all(
            min(num_pages, group.plan.width) - len(group.pages[seat]) <= group.pool.num_free for group in self.groups
        )

    def reserve(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """Make positions num_committed .. num_committed + num_rows - 1 of a seat writable; False if pages run out.

        A verify pass has draft length + 1 rows. Pages wholly before the window of row num_committed are given up
        first, whether or not there is room. On False nothing was taken, and nothing else changed.
        """
        size = self.plan.page_size
        written = range(num_committed // size, (num_committed + num_rows - 1) // size + 1)
        for group in self.groups:
            first = group.first_visible(num_committed, size)
            if first > 0:
                for logical in [logical for logical in group.pages[seat] if logical < first]:
                    group.drop(seat, logical)
            assert written.stop - first <= group.plan.width, f"{num_rows} rows are more than a ring has room for"
        missing = [[logical for logical in written if logical not in group.pages[seat]] for group in self.groups]
        if any(len(pages) > group.pool.num_free for group, pages in zip(self.groups, missing, strict=True)):
            return False
        for group, logical_pages in zip(self.groups, missing, strict=True):
            for logical in logical_pages:
                group.map(seat, logical, group.pool.take())
            assert all(group.pool.is_writable(group.pages[seat][logical]) for logical in written), (
                f"seat {seat} would write into a page that others may read"
            )
        self._writable[seat] = range(num_committed, written.stop * size)
        return True

    def is_reserved(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """True if the positions that `reserve` would make writable are; nothing is given up."""
        writable = self._writable[seat]
        return writable.start <= num_committed and num_committed + num_rows <= writable.stop

    def flush(self) -> None:
        """Let passes see the pages that seats have now; before each pass."""
        for group in self.groups:
            group.page_table.flush()

    def release(self, seat: int) -> None:
        """Empty a seat. Its published pages stay findable until their memory is needed, the beginning longest."""
        for group in self.groups:
            for _, page in sorted(group.pages[seat].items(), reverse=True):
                group.pool.let_go(page)
            group.pages[seat].clear()
            group.page_table.clear(seat)
            group.named[seat].clear()
        self.page_keys[seat], self._writable[seat] = [], range(0)

    def match_prefix(self, token_ids: Sequence[int], *, salt: bytes = b"") -> int:
        """Tokens at the beginning of a prompt whose rows need not be run: whole pages, and never all of the prompt.

        The longest such prefix after which every group still holds all that the next row may see.
        """
        size = self.plan.page_size
        keys = _extended([], token_ids, (len(token_ids) - 1) // size, size, salt)
        holds = [group.holds_before(keys, size) for group in self.groups]
        return size * max((n for n, each in enumerate(zip(*holds, strict=True)) if all(each)), default=0)

    def adopt(self, seat: int, token_ids: Sequence[int], num_tokens: int, *, salt: bytes = b"") -> None:
        """Begin an empty seat with the first `num_tokens` tokens, as `match_prefix` has just found them."""
        size = self.plan.page_size
        assert not any(group.pages[seat] for group in self.groups), f"seat {seat} is not empty"
        keys = _extended([], token_ids, num_tokens // size, size, salt)
        for group in self.groups:
            for logical in range(group.first_visible(num_tokens, size), len(keys)):
                page = group.pool.find(keys[logical])
                assert page is not None, "adopt what match_prefix found, before pages are taken"
                group.pool.share(page)
                group.map(seat, logical, page)
        self.page_keys[seat] = keys

    def publish(self, seat: int, token_ids: Sequence[int], boundaries: Sequence[int], *, salt: bytes = b"") -> None:
        """Make a seat's whole pages findable. `token_ids` are those whose rows are committed, no draft among them.

        Boundaries are numbers of tokens where later prompts are likely to part: ends of turns, of the prompt, of the
        answer. A window's pages are kept only for the last window + 256 tokens before one, and a seat gives its old
        ones up as it grows: publish after every pass of a prompt, with all boundaries each time, later ones included.
        """
        size, keys = self.plan.page_size, self.page_keys[seat]
        num_known = len(keys)
        _extended(keys, token_ids, len(token_ids) // size, size, salt)
        if len(keys) > num_known:
            writable = self._writable[seat]
            self._writable[seat] = range(max(writable.start, len(keys) * size), writable.stop)
            for group in self.groups:
                group.publish(seat, keys, num_known, boundaries, size)

    def withdraw(self, seat: int) -> None:
        """No page of a seat's text, as far as it was published, can be found any more, whoever holds it."""
        for group in self.groups:
            for key in self.page_keys[seat]:
                group.pool.forget(key)

    def forget_prefixes(self) -> None:
        """Nothing published can be found any more; what seats hold stays theirs."""
        for group in self.groups:
            group.pool.forget_all()

    def assert_consistent(self) -> None:
        """Check every account: pools against seats, page tables against both."""
        for group in self.groups:
            group.pool.assert_consistent(page for pages in group.pages for page in pages.values())
            expected = torch.full_like(group.table, -1)
            for seat, pages in enumerate(group.pages):
                assert len({logical % group.plan.width for logical in pages}) == len(pages)
                for logical, page in pages.items():
                    expected[seat, logical % group.plan.width] = page
            assert torch.equal(group.table, expected)


def _extended(keys: list[bytes], token_ids: Sequence[int], num_pages: int, page_size: int, salt: bytes) -> list[bytes]:
    """`keys` up to so many pages: each a hash of the one before (the salt before the first) and its page's tokens."""
    for logical in range(len(keys), num_pages):
        tokens = array("q", token_ids[logical * page_size : (logical + 1) * page_size]).tobytes()
        before = keys[-1] if keys else hashlib.blake2b(salt, digest_size=KEY_BYTES).digest()
        keys.append(hashlib.blake2b(before + tokens, digest_size=KEY_BYTES).digest())
    return keys


def _empty_group(plan: GroupPlan, num_seats: int, device: torch.device | str) -> PageGroup:
    pool = PagePool(plan.num_pages, max_cached_pages=plan.max_cached_pages)
    return PageGroup(plan, PageTable(num_seats, plan.width, device), pool, [{} for _ in range(num_seats)])


def _layer_caches(
    layers: Sequence[LayerSpec],
    groups: dict[int | None, PageGroup],
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> LayerCaches:
    """One LayerCache a layer; a layer with a `cache_source` gets that layer's own."""
    caches = LayerCaches()
    for spec in layers:
        if spec.cache_source is not None:
            caches.append(caches[spec.cache_source])
            continue
        group = groups[spec.window]
        shape = (group.plan.num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        caches.append(LayerCache(keys, values, group.table, spec.window))
    return caches
