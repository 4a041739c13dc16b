"""Plain torch twins of every kernel: the specification, the fallback without a compiler, and the first CUDA path.

Any floating dtype on any device. Shapes never depend on data and nothing is read back to the host, so a pass has the
same launches whatever it carries.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.heads import HeadNorms, HeadRows, finish_heads_stepwise
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.recording import Body
from outrider.kernels.sampler import Sampler, Sampling, TorchSampler
from outrider.kernels.walk import SlotWalk, Walked, WalkStarts, walk_stepwise
from outrider.weights.packed import PackedWeight

# Columns of `spans`, int32 [R, 5]: what each query row of `attention` may see.
SPAN_SEAT, SPAN_CONTEXT_START, SPAN_CONTEXT_END, SPAN_FRESH_START, SPAN_FRESH_END = range(5)

EXPERT_ROWS = 16  # rows whose experts' weights are gathered at a time, to bound memory in prefill
ATTENTION_ROWS = 16  # rows whose keys and values are gathered at a time, to bound memory in prefill


class TorchKernels:
    """The `Kernels` protocol in plain torch. Sums are taken in float32 (float64 for float64 inputs)."""

    name = "torch"
    row_invariant = False  # torch picks another product for another number of rows
    reads_low_bit = False
    sampler: Sampler = TorchSampler()

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Weights are kept dequantised, in `dtype` on `device`."""
        self.dtype = dtype
        self.device = torch.device(device)

    def own_threads(self) -> AbstractContextManager[None]:
        """Torch's threads are the only ones."""
        return nullcontext()

    def pack(self, weight: PackedWeight) -> Tensor:
        """The numbers of a weight, [out, in]."""
        return weight.dequantize(self.dtype, self.device)

    def pack_together(self, weights: Sequence[PackedWeight]) -> list[Tensor]:
        """Each for itself."""
        return [self.pack(weight) for weight in weights]

    def run(
        self, body: Body, inputs: Sequence[Tensor], *, recordings: dict[Hashable, Any], key: Hashable
    ) -> list[Tensor]:
        """body(*inputs): nothing is recorded."""
        del recordings, key
        return body(*inputs)

    def linear(self, inputs: Tensor, weight: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """inputs [R, in] @ weight [out, in]^T (+ residual [R, out]) -> [R, out]."""
        product = functional.linear(inputs, weight)
        return product if residual is None else residual + product

    def linears(self, inputs: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """`linear` for several weights that read the same inputs."""
        return [functional.linear(inputs, weight) for weight in weights]

    def gated_linear(self, inputs: Tensor, gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
        """activation(inputs @ gate^T) * (inputs @ up^T)."""
        return _gated(functional.linear(inputs, gate), functional.linear(inputs, up), activation)

    def logits(self, inputs: Tensor, weight: Tensor, *, cap: float | None = None) -> Tensor:
        """`linear` with a float32 result (float64 for float64 inputs), so that half-precision logits do not tie."""
        if inputs.is_cuda and inputs.dtype != torch.float32 and inputs.dtype != torch.float64:
            return soft_cap(torch.mm(inputs, weight.t(), out_dtype=torch.float32), cap)
        return soft_cap(_widened(functional.linear(inputs, weight)), cap)

    def best(self, inputs: Tensor, weight: Tensor, *, cap: float | None = None) -> tuple[Tensor, Tensor]:
        """Largest logit of each row [R] and its index int64 [R]."""
        largest = self.logits(inputs, weight, cap=cap).max(dim=-1)
        return largest.values, largest.indices

    def embed(self, token_ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
        """Rows token_ids [R] of weight [V, N], times a factor -> [R, N]."""
        rows = functional.embedding(token_ids, weight)
        return rows if scale == 1.0 else rows * scale

    def gated(self, inputs: Tensor, factors: Tensor, *, activation: str) -> Tensor:
        """activation(inputs) * factors, of one shape."""
        return _gated(inputs, factors, activation)

    def pack_experts(self, gate_up: PackedWeight, down: PackedWeight) -> tuple[Tensor, Tensor]:
        """The numbers of gate_up [E, 2I, N] and down [E, N, I]."""
        return self.pack(gate_up), self.pack(down)

    def experts(
        self, inputs: Tensor, weights: tuple[Tensor, Tensor], chosen: Tensor, shares: Tensor, *, activation: str
    ) -> Tensor:
        """Sum over k of shares[r, k] * down(activation(gate x) * up x) with expert chosen[r, k]: [R, N] -> [R, N]."""
        gate_up, down = weights
        outputs = []
        for start in range(0, len(inputs), EXPERT_ROWS):
            rows = slice(start, start + EXPERT_ROWS)
            total = torch.zeros_like(_widened(inputs[rows]))
            for expert, share in zip(chosen[rows].unbind(1), shares[rows].unbind(1), strict=True):
                gate, up = _matrices_times_rows(gate_up[expert], inputs[rows]).chunk(2, dim=-1)
                fed = _matrices_times_rows(down[expert], _gated(gate, up, activation))
                total = total + _widened(fed) * share[:, None]
            outputs.append(total.to(inputs.dtype))
        return torch.cat(outputs) if outputs else torch.empty_like(inputs)

    def rms_norm(self, inputs: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        return (_normalized(_widened(inputs), eps) * _widened(weight)).to(inputs.dtype)

    def rms_norm_add(
        self, inputs: Tensor, weight: Tensor, residual: Tensor, *, eps: float, scale: float = 1.0
    ) -> Tensor:
        """(residual + rms_norm(inputs)) * scale."""
        added = residual + self.rms_norm(inputs, weight, eps=eps)
        return added if scale == 1.0 else added * scale

    def rms_norm_add_norm(
        self,
        inputs: Tensor,
        weight: Tensor,
        residual: Tensor,
        next_weight: Tensor,
        *,
        eps: float,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """rms_norm_add, and the norm of what it gives."""
        hidden = self.rms_norm_add(inputs, weight, residual, eps=eps, scale=scale)
        return hidden, self.rms_norm(hidden, next_weight, eps=eps)

    def head_norm_rope(
        self, heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, *, eps: float
    ) -> Tensor:
        """Norm over each head of [R, H, D] (unless weight is None), then rotate the pairs (i, i + D/2)."""
        wide = _widened(heads)
        if weight is not None:
            wide = _normalized(wide, eps) * _widened(weight)
        row_cos = cos[positions][:, None, :]  # [R, 1, D/2]
        row_sin = sin[positions][:, None, :]
        first, second = wide.chunk(2, dim=-1)
        rotated = torch.cat([first * row_cos - second * row_sin, second * row_cos + first * row_sin], dim=-1)
        return rotated.to(heads.dtype)

    def finish_heads(
        self,
        projected: HeadRows,
        norms: HeadNorms,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        *,
        eps: float,
        cache: LayerCache | None = None,
        seats: Tensor | None = None,
    ) -> HeadRows:
        """head_norm_rope of queries and keys, rms_norm of values, then write_cache where there is a cache."""
        return finish_heads_stepwise(self, projected, norms, cos, sin, positions, eps=eps, cache=cache, seats=seats)

    def write_cache(self, cache: LayerCache, keys: Tensor, values: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Store keys and values [R, G, D] at slot position mod P of each row's page; no slot is written twice."""
        # A row without a page repeats the first live row's write, or writes back what is there if no row is live.
        page_size, width = cache.keys.shape[1], cache.table.shape[1]
        row_pages = cache.table[seats.clamp_min(0), positions // page_size % width].long()
        live = (seats >= 0) & (row_pages >= 0)
        rows = torch.arange(seats.shape[0], device=seats.device)
        source = torch.where(live, rows, live.int().argmax())
        pages, slots = row_pages[source].clamp_min(0), positions[source] % page_size
        any_live = live[source][:, None, None]
        for stored, fresh in ((cache.keys, keys), (cache.values, values)):
            stored[pages, slots] = torch.where(any_live, fresh[source], stored[pages, slots])

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        spans: Tensor,
        *,
        scale: float,
        fresh_k: Tensor | None = None,
        fresh_v: Tensor | None = None,
    ) -> Tensor:
        """Softmax attention of queries [R, H, D] over the context and fresh rows that spans [R, 5] names."""
        num_fresh = 0 if fresh_k is None else fresh_k.shape[0]
        outputs = []
        for start in range(0, queries.shape[0], ATTENTION_ROWS):
            rows = slice(start, start + ATTENTION_ROWS)
            pages = cache.table[spans[rows, SPAN_SEAT].clamp_min(0).long()]  # [R, W]
            visible = _visible(spans[rows], pages, page_size=cache.keys.shape[1], num_fresh=num_fresh)
            keys = _gathered(cache.keys, fresh_k, pages, visible)
            values = _gathered(cache.values, fresh_v, pages, visible)
            outputs.append(_attend(queries[rows], keys, values, visible, scale=scale))
        return torch.cat(outputs) if outputs else torch.empty_like(queries)

    def walk(self, slots: SlotWalk, starts: WalkStarts, sampling: Sampling | None) -> Walked:
        """Slot by slot; spare requests too."""
        return walk_stepwise(slots, starts, sampling, self.sampler)


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap); unchanged where there is no cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _widened(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    wide = _widened(gate)
    activated = functional.silu(wide) if activation == "silu" else functional.gelu(wide, approximate="tanh")
    return (activated * _widened(up)).to(gate.dtype)


def _matrices_times_rows(matrices: Tensor, rows: Tensor) -> Tensor:
    """A matrix of its own for each row: [R, out, in] times [R, in] -> [R, out]."""
    return torch.bmm(matrices, rows[:, :, None]).squeeze(-1)


def _normalized(values: Tensor, eps: float) -> Tensor:
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)


def _visible(spans: Tensor, pages: Tensor, *, page_size: int, num_fresh: int) -> Tensor:
    """Which slots of its seat's pages [R, W], then which fresh rows, each row sees: bool [R, W * P + F]."""
    num_slots = pages.shape[1] * page_size
    start = spans[:, SPAN_CONTEXT_START, None]
    newest = spans[:, SPAN_CONTEXT_END, None] - 1
    slots = torch.arange(num_slots, device=spans.device)
    positions = newest - torch.remainder(newest - slots, num_slots)  # the newest position that a slot can hold
    fresh = torch.arange(num_fresh, device=spans.device)
    in_context = (positions >= start.clamp_min(0)) & (pages >= 0).repeat_interleave(page_size, dim=1)
    in_fresh = (fresh >= spans[:, SPAN_FRESH_START, None]) & (fresh < spans[:, SPAN_FRESH_END, None])
    return torch.cat([in_context, in_fresh], dim=1) & (spans[:, SPAN_SEAT, None] >= 0)


def _gathered(stored: Tensor, fresh: Tensor | None, pages: Tensor, visible: Tensor) -> Tensor:
    """Each row's keys or values, [R, W * P + F, G, D]; what it does not see is 0, since 0 * NaN would be NaN."""
    rows = stored[pages.clamp_min(0).long()].flatten(1, 2)
    if fresh is not None:
        rows = torch.cat([rows, fresh.expand(rows.shape[0], *fresh.shape)], dim=1)
    return _widened(rows).masked_fill(~visible[:, :, None, None], 0.0)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, *, scale: float) -> Tensor:
    num_rows, num_heads, head_size = queries.shape
    grouped = _widened(queries).view(num_rows, keys.shape[2], -1, head_size)  # [R, G, H/G, D]
    hidden = ~visible[:, None, None, :]
    scores = torch.einsum("rghd,rsgd->rghs", grouped, keys) * scale
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    weights = weights.masked_fill(hidden, 0.0)  # a row that sees nothing gets zeros
    attended = torch.einsum("rghs,rsgd->rghd", weights, values)
    return attended.reshape(num_rows, num_heads, head_size).to(queries.dtype)
