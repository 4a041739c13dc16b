"""The kernel set for CUDA: bf16 in Triton kernels, a row's bits the same whatever shares its pass (design §4.2).

Weights are bf16 too, or int8 or int4 where `low_bit.py` has a form for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from outrider.kernels import rows
from outrider.kernels.attention import attention
from outrider.kernels.heads import HeadNorms, HeadRows
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.low_bit import LowBitMatrix, joined, low_bit_matrix
from outrider.kernels.matmul import Products, merged
from outrider.kernels.matmul_low_bit import low_bit_best, low_bit_product
from outrider.kernels.matmul_sizes import MAX_GATED_ROWS
from outrider.kernels.recording import Body
from outrider.kernels.reference import TorchKernels
from outrider.kernels.sampler import Sampler, Sampling
from outrider.kernels.sampling import GpuSampler
from outrider.kernels.walk import SlotWalk, Walked, WalkStarts
from outrider.kernels.walk_kernel import walk_in_one
from outrider.weights.packed import PackedWeight

Matrix = Tensor | LowBitMatrix


class GpuKernels:
    """The `Kernels` protocol on a CUDA device. Experts still run on the torch twin, which is not row-invariant."""

    name = "gpu"
    row_invariant = True
    reads_low_bit = True
    sampler: Sampler = GpuSampler()

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """Weights without a low-bit form are kept dequantised, in `dtype` on `device`."""
        self.dtype, self.device = dtype, torch.device(device)
        self._products = Products(self.device)
        self._twin = TorchKernels(dtype, device)

    def own_threads(self) -> AbstractContextManager[None]:
        """Torch's threads are the only ones on the host."""
        return nullcontext()

    def pack(self, weight: PackedWeight) -> Matrix:
        """The numbers of a weight, [out, in], or what they are made of."""
        low_bit = low_bit_matrix(weight, self.device)
        return self._twin.pack(weight).contiguous() if low_bit is None else low_bit

    def pack_together(self, weights: Sequence[PackedWeight]) -> list[Matrix]:
        """Several weights, one after the other in memory where they are of one kind, so that one product serves all."""
        num_outputs = [weight.shape[0] for weight in weights]
        low_bit = [matrix for weight in weights if (matrix := low_bit_matrix(weight, self.device)) is not None]
        if len(low_bit) == len(weights) and len({matrix.is_int4 for matrix in low_bit}) == 1:
            return [*joined(low_bit).split(num_outputs)]
        if low_bit:
            return [self.pack(weight) for weight in weights]
        together = torch.empty(sum(num_outputs), weights[0].shape[1], dtype=self.dtype, device=self.device)
        parts = list(torch.split(together, num_outputs))
        for part, weight in zip(parts, weights, strict=True):
            part.copy_(self._twin.pack(weight))
        return [*parts]

    def run(
        self, body: Body, inputs: Sequence[Tensor], *, recordings: dict[Hashable, Any], key: Hashable
    ) -> list[Tensor]:
        """body(*inputs): whole cycles are captured, by `engine.graphs`."""
        del recordings, key
        return body(*inputs)

    def linear(self, inputs: Tensor, weight: Matrix, *, residual: Tensor | None = None) -> Tensor:
        """inputs [R, in] @ weight [out, in]^T (+ residual [R, out]) -> [R, out]."""
        if isinstance(weight, LowBitMatrix):
            return low_bit_product(inputs, weight, residual=residual)
        return self._products.product(inputs, weight, residual=residual)

    def linears(self, inputs: Tensor, weights: Sequence[Matrix]) -> list[Tensor]:
        """`linear` for several weights that read the same inputs: slices of one product, if they lie together."""
        together = _merged(weights)
        if together is None:
            return [self.linear(inputs, weight) for weight in weights]
        return list(torch.split(self.linear(inputs, together), [weight.shape[0] for weight in weights], dim=1))

    def gated_linear(self, inputs: Tensor, gate: Matrix, up: Matrix, *, activation: str) -> Tensor:
        """activation(inputs @ gate^T) * (inputs @ up^T); many rows, or few bits, take two products."""
        if isinstance(gate, LowBitMatrix) or isinstance(up, LowBitMatrix):
            first, second = self.linears(inputs, (gate, up))
            return rows.gated(first, second, activation=activation)
        if len(inputs) <= MAX_GATED_ROWS:
            return self._products.gated_product(inputs, gate, up, is_silu=activation == "silu")
        products = [self._products.product(inputs, weight, splits=1) for weight in (gate, up)]
        return rows.gated(*products, activation=activation)

    def logits(self, inputs: Tensor, weight: Matrix, *, cap: float | None = None) -> Tensor:
        """`linear` with a float32 result, perhaps soft-capped; the sums are those of `best`."""
        if isinstance(weight, LowBitMatrix):
            return low_bit_product(inputs, weight, cap=cap, dtype=torch.float32)
        return self._products.product(inputs, weight, cap=cap, dtype=torch.float32, splits=1)

    def best(self, inputs: Tensor, weight: Matrix, *, cap: float | None = None) -> tuple[Tensor, Tensor]:
        """Largest logit of each row [R] and its index int64 [R]; the logits themselves are never stored."""
        if isinstance(weight, LowBitMatrix):
            return low_bit_best(inputs, weight, cap=cap)
        return self._products.best(inputs, weight, cap=cap)

    def embed(self, token_ids: Tensor, weight: Matrix, *, scale: float = 1.0) -> Tensor:
        """Rows token_ids [R] of weight [V, N], times a factor -> [R, N]."""
        if isinstance(weight, LowBitMatrix):
            return weight.rows(token_ids, self.dtype) * scale
        return rows.embed(token_ids, weight, scale=scale)

    def gated(self, inputs: Tensor, factors: Tensor, *, activation: str) -> Tensor:
        """activation(inputs) * factors, of one shape."""
        return rows.gated(inputs, factors, activation=activation)

    def pack_experts(self, gate_up: PackedWeight, down: PackedWeight) -> tuple[Tensor, Tensor]:
        """The numbers of gate_up [E, 2I, N] and down [E, N, I]."""
        return self._twin.pack_experts(gate_up, down)

    def experts(
        self, inputs: Tensor, weights: tuple[Tensor, Tensor], chosen: Tensor, shares: Tensor, *, activation: str
    ) -> Tensor:
        """Sum over k of shares[r, k] * down(activation(gate x) * up x) with expert chosen[r, k], by the twin."""
        return self._twin.experts(inputs, weights, chosen, shares, activation=activation)

    def rms_norm(self, inputs: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        return rows.rms_norm(inputs, weight, eps=eps)

    def rms_norm_add(
        self, inputs: Tensor, weight: Tensor, residual: Tensor, *, eps: float, scale: float = 1.0
    ) -> Tensor:
        """(residual + rms_norm(inputs)) * scale."""
        return rows.rms_norm_add(inputs, weight, residual, eps=eps, scale=scale)

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
        """rms_norm_add, and the norm of what it gives, in one launch."""
        return rows.rms_norm_add_norm(inputs, weight, residual, next_weight, eps=eps, scale=scale)

    def head_norm_rope(
        self, heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, *, eps: float
    ) -> Tensor:
        """Norm over each head of [R, H, D] (unless weight is None), then rotate the pairs (i, i + D/2)."""
        projected = HeadRows(heads.flatten(1), None, None)
        queries = self.finish_heads(projected, HeadNorms(weight, None, None), cos, sin, positions, eps=eps).queries
        assert queries is not None
        return queries

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
        """Norms, the rotation and the way into the cache, in one launch."""
        return rows.finish_heads(projected, norms, cos, sin, positions, eps=eps, cache=cache, seats=seats)

    def write_cache(self, cache: LayerCache, keys: Tensor, values: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Store keys and values [R, G, D] at slot position mod P of each row's page."""
        self._twin.write_cache(cache, keys, values, seats, positions)

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
        return attention(queries, cache, spans, scale=scale, fresh_k=fresh_k, fresh_v=fresh_v)

    def walk(self, slots: SlotWalk, starts: WalkStarts, sampling: Sampling | None) -> Walked:
        """In one launch."""
        return walk_in_one(slots.tensors(starts.token_ids), starts, sampling)


def _merged(weights: Sequence[Matrix]) -> Matrix | None:
    """Matrices of one kind that lie one after the other in memory, as one; None where they do not."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    low_bit = [weight for weight in weights if isinstance(weight, LowBitMatrix)]
    if not low_bit:
        return merged(plain)
    if plain:
        return None
    values, scales = merged([weight.values for weight in low_bit]), merged([weight.scales for weight in low_bit])
    return None if values is None or scales is None else LowBitMatrix(values, scales)
