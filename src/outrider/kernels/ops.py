"""The only door to the kernels: what a kernel set must offer, and which set a machine gets.

Models never import a kernel; they call the `Kernels` object they were built with. `reference.py` is the plain torch
twin of everything here and the specification; `cpu.py` is the compiled set for CPUs.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.kernels.compiler import NotCompiledError
from outrider.kernels.cpu import load_cpu_kernels
from outrider.kernels.heads import HeadNorms, HeadRows
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.recording import Body
from outrider.kernels.reference import TorchKernels
from outrider.kernels.sampler import Sampler, Sampling
from outrider.kernels.walk import SlotWalk, Walked, WalkStarts
from outrider.weights.locate import cache_dir
from outrider.weights.packed import PackedWeight

KERNEL_KINDS = ("auto", "cpu", "gpu", "torch")


class Kernels(Protocol):
    """A set of kernels. R rows, N hidden size, H query heads, G key/value heads, D head size.

    Contract (design §4.2): a row's result depends on that row's own inputs only, never on how many rows share the
    call nor on which they are. Rows whose seat is -1 are spare: their results are zero and they write nothing.
    """

    name: str
    row_invariant: bool  # True where the contract above holds bit for bit
    reads_low_bit: bool  # True where matrices as in `low_bit.py` are multiplied as they are, not dequantised
    sampler: Sampler  # what is done with logits

    def own_threads(self) -> AbstractContextManager[None]:
        """Decode inside this: torch keeps out of the way of a set that has threads of its own."""
        ...

    def pack(self, weight: PackedWeight) -> Any:
        """Prepare a stored weight for `linear` and `embed` of this set."""
        ...

    def pack_together(self, weights: Sequence[PackedWeight]) -> list[Any]:
        """`pack` for weights [out_i, in] that will be multiplied with the same inputs: a set may want them in one."""
        ...

    def run(
        self, body: Body, inputs: Sequence[Tensor], *, recordings: dict[Hashable, Any], key: Hashable
    ) -> list[Tensor]:
        """body(*inputs); a set may record the body's calls in `recordings` under `key` and replay them later.

        The body calls kernels on its inputs, on weights and on the caches that `recordings` belong to; nothing else.
        """
        ...

    def linear(self, inputs: Tensor, weight: Any, *, residual: Tensor | None = None) -> Tensor:
        """inputs [R, in] @ weight [out, in]^T (+ residual [R, out]) -> [R, out]."""
        ...

    def linears(self, inputs: Tensor, weights: Sequence[Any]) -> list[Tensor]:
        """`linear` for up to three weights that read the same inputs."""
        ...

    def gated_linear(self, inputs: Tensor, gate: Any, up: Any, *, activation: str) -> Tensor:
        """activation(inputs @ gate^T) * (inputs @ up^T), [R, I]; activation is 'gelu_tanh' or 'silu'."""
        ...

    def logits(self, inputs: Tensor, weight: Any, *, cap: float | None = None) -> Tensor:
        """`linear` whose result is at least float32: [R, in] -> [R, out]. Half-precision logits would tie.

        With a cap: cap * tanh(logits / cap).
        """
        ...

    def best(self, inputs: Tensor, weight: Any, *, cap: float | None = None) -> tuple[Tensor, Tensor]:
        """Largest logit of each row [R] and its index int64 [R], as `logits(...).max(dim=-1)`: ties to the lower id.

        A cap rounds, so that different logits can tie.
        """
        ...

    def embed(self, token_ids: Tensor, weight: Any, *, scale: float = 1.0) -> Tensor:
        """Rows of a weight times a factor: token_ids int64 [R] -> [R, in]."""
        ...

    def gated(self, inputs: Tensor, factors: Tensor, *, activation: str) -> Tensor:
        """activation(inputs) * factors, of one shape."""
        ...

    def pack_experts(self, gate_up: PackedWeight, down: PackedWeight) -> Any:
        """Prepare the fused weights of E experts for `experts`: gate_up [E, 2I, N], gate rows first; down [E, N, I]."""
        ...

    def experts(self, inputs: Tensor, weights: Any, chosen: Tensor, shares: Tensor, *, activation: str) -> Tensor:
        """Sum over k of shares[r, k] * down(activation(gate x) * up x) with expert chosen[r, k]: [R, N] -> [R, N].

        chosen is int64 [R, K], each expert at most once a row; shares is [R, K], at least float32. Not for bodies of
        `run`: which weights are read depends on data.
        """
        ...

    def rms_norm(self, inputs: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension of [R, N]."""
        ...

    def rms_norm_add(
        self, inputs: Tensor, weight: Tensor, residual: Tensor, *, eps: float, scale: float = 1.0
    ) -> Tensor:
        """(residual + rms_norm(inputs)) * scale: the sandwich norm of Gemma, [R, N]."""
        ...

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
        """hidden = rms_norm_add(inputs, weight, residual), and rms_norm(hidden, next_weight): two of [R, N]."""
        ...

    def head_norm_rope(
        self, heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, *, eps: float
    ) -> Tensor:
        """RMS norm over each head of [R, H, D] (unless weight is None), rotary embedding of the pairs (i, i + D/2).

        cos and sin are tables [P, D/2] indexed by positions int64 [R].
        """
        ...

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
        """What follows the projections of an attention layer: norms, the rotation, and the way into the cache.

        Queries and keys as `head_norm_rope`, values as `rms_norm` over each head (as they are without a norm); values
        may be the keys' own projection. With a cache and seats int64 [R], keys and values go to where `write_cache`
        would put them, and only the queries come back. What `projected` lacks is not made.
        """
        ...

    def write_cache(self, cache: LayerCache, keys: Tensor, values: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Store keys and values [R, G, D] where the cache's page table has each row's position.

        seats and positions are int64 [R]; live rows of one call must not share a slot. A row without a page writes
        nothing.
        """
        ...

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
        """Softmax attention of queries [R, H, D] -> [R, H, D].

        Row r sees, in this order, the cached positions context_start <= p < context_end of its seat (of those, the
        newest that fit the ring, as far as they have a page) and the fresh rows fresh_start <= f < fresh_end of
        fresh_k, fresh_v [F, G, D]. Where the pages lie changes no bit. Query head h reads key/value head h // (H / G).
        """
        ...

    def walk(self, slots: SlotWalk, starts: WalkStarts, sampling: Sampling | None) -> Walked:
        """Draft all slots of a block for Q requests, left to right, each slot given the draft before it.

        Without `sampling` every draft is the best candidate (ties to the one with the better base logit); with it
        drafts are drawn as by `Sampler.draw`. A spare request's drafts mean nothing.
        """
        ...


def select_kernels(kind: str, *, dtype: torch.dtype, device: torch.device | str) -> Kernels:
    """The kernel set of one of `KERNEL_KINDS` for a dtype and device.

    'auto' takes the compiled set for float32 on a CPU and the Triton set for bfloat16 on CUDA, with a warning where
    they are not to be had, and torch products elsewhere; 'cpu' and 'gpu' insist (ConfigError); 'torch' runs anywhere.
    """
    if kind not in KERNEL_KINDS:
        raise ConfigError(f"kernels={kind!r} is unknown; choose one of {', '.join(KERNEL_KINDS)}.")
    place = torch.device(device)
    suited = {("cpu", torch.float32): "cpu", ("cuda", torch.bfloat16): "gpu"}.get((place.type, dtype), "torch")
    if kind in ("cpu", "gpu") and kind != suited:
        wanted = "float32 on a CPU" if kind == "cpu" else "bfloat16 on CUDA"
        raise ConfigError(f"kernels={kind!r} run {wanted}, not {dtype} on {place}; choose 'auto' or 'torch'.")
    if kind == "torch" or suited == "torch":
        return TorchKernels(dtype, place)
    try:
        return load_cpu_kernels(cache_dir()) if suited == "cpu" else load_gpu_kernels(dtype, place)
    except NotCompiledError as error:
        if kind != "auto":
            raise
        warnings.warn(f"Decoding falls back to torch products, several times slower. {error}", stacklevel=2)
        return TorchKernels(dtype, place)


def load_gpu_kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """The Triton set; NotCompiledError where Triton is missing."""
    try:
        from outrider.kernels.gpu import GpuKernels
    except ImportError as error:
        raise NotCompiledError(f"The GPU kernels need Triton, which comes with torch for CUDA: {error}") from error
    return GpuKernels(dtype, device)
