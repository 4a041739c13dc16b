"""F1 and F2 on shared pages: a decoding loop of a few lines, and kernels that find out who writes where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.engine.cache_plan import plan_pages
from outrider.engine.kv_cache import KvCache
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import Rows
from tests.toy import CPU, TAP_LAYERS, block_logits, toy_drafter, toy_target

PAGE_SIZE, PASS_ROWS, CONTEXT_LENGTH = 4, 5, 96


class OwnershipKernels(TorchKernels):
    """Raise where a row is written into a page that its seat does not hold alone, or that others can find."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.kv_cache: KvCache | None = None
        self.num_checked = 0

    def write_cache(self, cache: LayerCache, keys: Tensor, values: Tensor, seats: Tensor, positions: Tensor) -> None:
        if self.kv_cache is not None:
            (group,) = (group for group in self.kv_cache.groups if group.table is cache.table)
            for seat, position in zip(seats.tolist(), positions.tolist(), strict=True):
                if seat >= 0:
                    page = group.pages[seat].get(position // PAGE_SIZE)
                    assert page is not None, f"seat {seat} has no page for position {position}"
                    assert group.pool.is_writable(page), f"seat {seat} writes into page {page}, which others read"
                    self.num_checked += 1
        super().write_cache(cache, keys, values, seats, positions)


@dataclass
class PagedRequest:
    """A request: its last token is the anchor, whose row is not committed yet."""

    seat: int
    token_ids: list[int]
    num_cached_tokens: int
    boundaries: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # drafts accepted in each cycle

    @property
    def num_committed(self) -> int:
        """Rows in the caches."""
        return len(self.token_ids) - 1


class PagedModels:
    """F1 and F2 over a KvCache whose memory holds NaN until it is written."""

    def __init__(self, *, num_seats: int = 2, filling: float = torch.nan, drafter_window: int | None = None) -> None:
        kernels = OwnershipKernels()
        self.target = toy_target(kernels=kernels)
        self.drafter = toy_drafter(self.target, window=drafter_window)
        layers = self.target.config.layers, self.drafter.config.layers
        sizes = {"num_seats": num_seats, "context_length": CONTEXT_LENGTH, "max_rows": PASS_ROWS}
        plan = plan_pages(*layers, dtype=torch.float64, page_size=PAGE_SIZE, **sizes)
        self.kv_cache = kernels.kv_cache = KvCache.allocate(plan, *layers, dtype=torch.float64, device=CPU)
        self.kernels = kernels
        for layer in (*self.kv_cache.target_caches, *self.kv_cache.drafter_caches):
            layer.keys.fill_(filling)
            layer.values.fill_(filling)

    def _run(self, rows: Rows) -> tuple[list[int], Tensor]:
        """A pass of the target: the best next tokens, and taps."""
        output = self.target.forward(rows, self.kv_cache.target_caches, tap_layers=TAP_LAYERS)
        assert output.taps is not None
        return self.target.best(output.hidden)[1].tolist(), output.taps

    def start(self, seat: int, prompt: Sequence[int], boundaries: Sequence[int] = ()) -> PagedRequest:
        """Prefill what no published page holds; publish; append the first token."""
        cache, prompt = self.kv_cache, list(prompt)
        num_cached = cache.match_prefix(prompt)
        cache.adopt(seat, prompt, num_cached)
        for start in range(num_cached, len(prompt), PASS_ROWS):
            token_ids = prompt[start : start + PASS_ROWS]
            assert cache.reserve(seat, num_committed=start, num_rows=len(token_ids))
            positions = torch.arange(start, start + len(token_ids))
            rows = Rows(torch.tensor(token_ids), torch.full_like(positions, seat), positions)
            best, taps = self._run(rows)
            self.drafter.write_context(taps, rows.seats, positions, cache.drafter_caches)
            cache.publish(seat, prompt[: start + len(token_ids)], [*boundaries, len(prompt)])
        return PagedRequest(seat, [*prompt, best[-1]], num_cached, [*boundaries, len(prompt)])

    def draft_logits(self, request: PagedRequest) -> Tensor:
        """What the drafter would propose after the anchor, [drafts, V]."""
        anchor, position = request.token_ids[-1], request.num_committed
        block = self.drafter.block(
            torch.tensor([anchor]), torch.tensor([request.seat]), torch.tensor([position]), num_drafts=4
        )
        return block_logits(self.drafter, block, self.kv_cache.drafter_caches)[0]

    def cycle(self, requests: Sequence[PagedRequest], drafts: Sequence[Sequence[int]]) -> None:
        """Verify some drafts of every request in one pass, greedily, and commit."""
        token_ids, seats, positions = list[int](), list[int](), list[int]()
        for request, drafted in zip(requests, drafts, strict=True):
            num_rows = len(drafted) + 1
            assert self.kv_cache.reserve(request.seat, num_committed=request.num_committed, num_rows=num_rows)
            token_ids += [request.token_ids[-1], *drafted]
            seats += [request.seat] * num_rows
            positions += range(request.num_committed, request.num_committed + num_rows)
        rows = Rows(torch.tensor(token_ids), torch.tensor(seats), torch.tensor(positions))
        best, taps = self._run(rows)
        kept_seats, first = list[int](), 0
        for request, drafted in zip(requests, drafts, strict=True):
            wanted = best[first : first + len(drafted) + 1]
            accepted = next((i for i, token in enumerate(drafted) if token != wanted[i]), len(drafted))
            request.token_ids += wanted[: accepted + 1]
            request.accepted.append(accepted)
            kept_seats += [request.seat if i <= accepted else -1 for i in range(len(drafted) + 1)]
            first += len(drafted) + 1
        self.drafter.write_context(taps, torch.tensor(kept_seats), rows.positions, self.kv_cache.drafter_caches)

    def finish(self, request: PagedRequest) -> None:
        """Publish the whole text and leave the seat."""
        committed = request.token_ids[:-1]
        self.kv_cache.publish(request.seat, committed, [*request.boundaries, len(committed)])
        self.kv_cache.release(request.seat)
        self.kv_cache.assert_consistent()
