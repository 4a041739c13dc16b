"""The compiled kernels for CPUs: `cpu.c` through ctypes.

Float32 rows, int8 weights decoded in registers. A row's result is the same bits whatever shares the call with it.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.environment import num_usable_cores
from outrider.errors import ConfigError
from outrider.kernels.compiler import load_library
from outrider.kernels.heads import HeadNorms, HeadRows, finish_heads_stepwise
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.recording import Body, Recording, Scratch, signature_of
from outrider.kernels.reference import soft_cap
from outrider.kernels.sampler import Sampler, Sampling, TorchSampler
from outrider.kernels.walk import SlotWalk, Walked, WalkStarts, walk_stepwise
from outrider.weights.packed import DenseWeight, PackedWeight

# As in cpu.c.
TILE = 64  # outputs a tile
LANES = 8  # a group of inputs is whole vectors of this many
FLAG_DENSE, FLAG_OFFSETS, FLAG_HALF_SCALES = 1, 2, 4
MAX_PARTS = 3  # weights one call multiplies the same inputs with
MAX_THREADS = 256

DENSE_GROUP = 32  # inputs that are summed before they join the total, where a weight has no groups
ARENA_BYTES = 64 << 20  # weights are laid out in pieces of this size; only what is written takes memory
ALIGNMENT_BYTES = 64
MAX_RECORDED_ROWS = 16  # a decoding pass; prefill is not bound by the interpreter

_POINTER, _COUNT = c_void_p, c_int64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "set_threads": (c_int32,),
    "has_half": (),
    "tile_bytes": (_COUNT, _COUNT, c_int32),
    "advise": (_POINTER, _COUNT),
    "pack": (_POINTER,) * 4,
    "linears": (_POINTER, _COUNT, *(_POINTER,) * 7),
    "gated_linear": (_POINTER, _COUNT, *(_POINTER,) * 3, c_int32),
    "gated": (*(_POINTER,) * 3, _COUNT, c_int32),
    "best": (_POINTER, _COUNT, *(_POINTER,) * 3),
    "embed": (_POINTER, _COUNT, _POINTER, _POINTER),
    "rms_norm": (*(_POINTER,) * 4, _COUNT, _COUNT, c_float, c_float),
    "head_norm_rope": (*(_POINTER,) * 6, _COUNT, _COUNT, _COUNT, c_float),
    "write_cache": (*(_POINTER,) * 7, *(_COUNT,) * 4),
    "attention": (*(_POINTER,) * 8, *(_COUNT,) * 6, c_float),
    "replay": (_POINTER, _COUNT),
}
_RESULTS: dict[str, Any] = {"has_half": c_int32, "tile_bytes": c_int64}


class WeightStruct(ctypes.Structure):
    """`weight_t` of cpu.c."""

    _fields_ = (
        ("tiles", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("group_size", c_int64),
        ("tile_bytes", c_int64),
        ("flags", c_int32),
    )


@dataclass(frozen=True, eq=False)
class TiledWeight:
    """A weight as cpu.c reads it."""

    name: str
    storage: Tensor  # uint8, whole tiles; `struct` points into it
    struct: WeightStruct
    address: int  # of `struct`
    out_features: int
    in_features: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.out_features, self.in_features


class ExpertWeights(NamedTuple):
    """One expert of `CpuKernels.experts`."""

    gate: TiledWeight
    up: TiledWeight
    down: TiledWeight


class CpuKernels:
    """The `Kernels` protocol on a CPU, in float32."""

    name = "cpu"
    row_invariant = True
    reads_low_bit = False  # but int8 in groups, whatever the group
    sampler: Sampler = TorchSampler()

    def __init__(self, library: ctypes.CDLL, *, num_threads: int) -> None:
        """Call `library`, compiled from cpu.c, with `num_threads` threads (the process has one pool for all sets)."""
        self._functions: dict[str, Any] = {}
        for name, types in _SIGNATURES.items():
            self._functions[name] = getattr(library, f"outrider_{name}")
            self._functions[name].argtypes = types
            self._functions[name].restype = _RESULTS.get(name)
        self._functions["set_threads"](num_threads)
        self.num_threads = num_threads
        self._keeps_half_scales = bool(self._functions["has_half"]())
        self._arena = torch.empty(0, dtype=torch.uint8)  # what is left of the memory that weights are taken from
        self._recording: Recording | None = None

    def run(
        self, body: Body, inputs: Sequence[Tensor], *, recordings: dict[Hashable, Any], key: Hashable
    ) -> list[Tensor]:
        """body(*inputs), recorded at first and replayed from then on where the inputs have few rows."""
        if len(inputs[0]) > MAX_RECORDED_ROWS:
            return body(*inputs)
        key = (key, signature_of(inputs))
        recording = recordings.get(key)
        if recording is not None:
            replayed: list[Tensor] = recording.replay(self._functions["replay"], inputs)
            return replayed
        scratch = next((recorded.scratch for recorded in recordings.values()), None)
        self._recording = recording = Recording(inputs, Scratch() if scratch is None else scratch)
        try:
            outputs = recording.record(body)
        finally:
            self._recording = None
        recordings[key] = recording
        return outputs

    def _call(self, name: str, *arguments: Any, kept: Sequence[Any]) -> None:
        if self._recording is not None:
            self._recording.note(name, arguments, _SIGNATURES[name], kept)
        self._functions[name](*arguments)

    @contextmanager
    def own_threads(self) -> Iterator[None]:
        """Torch keeps to one thread: its others spin on after each operation, on the cores these kernels need."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def pack(self, weight: PackedWeight) -> TiledWeight:
        """Lay a matrix [out, in] out in tiles; the numbers stay as they are."""
        if isinstance(weight, DenseWeight):
            values = weight.values.to("cpu", torch.float32).contiguous()
            return self._tiled(weight.name, values, None, None, group_size=DENSE_GROUP)
        if weight.group_size % LANES or weight.shape[1] % weight.group_size:
            raise ConfigError(
                f"{weight.name} has {weight.shape[1]} inputs in groups of {weight.group_size}; the CPU kernels need "
                f"whole groups of a multiple of {LANES}. Use the torch kernels (--kernels torch)."
            )
        offsets = None if weight.offsets is None else weight.offsets.to("cpu", torch.float32).contiguous()
        scales = self._smallest_exact(weight.scales.cpu())
        return self._tiled(weight.name, weight.values.cpu(), scales, offsets, group_size=weight.group_size)

    def pack_together(self, weights: Sequence[PackedWeight]) -> list[TiledWeight]:
        """Each for itself: one call reads up to three wherever they lie."""
        return [self.pack(weight) for weight in weights]

    def _smallest_exact(self, scales: Tensor) -> Tensor:
        """Scales in float16 where that loses nothing: passes are bound by the bytes of the weights."""
        half = scales.to(torch.float16)
        return half if self._keeps_half_scales and torch.equal(half.to(torch.float32), scales) else scales

    def _tiled(
        self, name: str, values: Tensor, scales: Tensor | None, offsets: Tensor | None, *, group_size: int
    ) -> TiledWeight:
        out_features, in_features = values.shape
        flags = FLAG_DENSE if scales is None else 0
        flags |= FLAG_HALF_SCALES if scales is not None and scales.dtype == torch.float16 else 0
        flags |= FLAG_OFFSETS if offsets is not None else 0
        tile_bytes = self._functions["tile_bytes"](in_features, group_size, flags)
        storage = self._take(-(-out_features // TILE) * tile_bytes)
        struct = WeightStruct(storage.data_ptr(), out_features, in_features, group_size, tile_bytes, flags)
        values, scales = values.contiguous(), None if scales is None else scales.contiguous()
        self._functions["pack"](ctypes.addressof(struct), values.data_ptr(), _pointer(scales), _pointer(offsets))
        return TiledWeight(name, storage, struct, ctypes.addressof(struct), out_features, in_features)

    def _take(self, num_bytes: int) -> Tensor:
        """Memory for one weight: a slice of a large piece, since small pieces of their own get no huge pages."""
        reserved = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if reserved > len(self._arena):
            self._arena = torch.empty(max(reserved, ARENA_BYTES), dtype=torch.uint8)
            self._functions["advise"](self._arena.data_ptr(), len(self._arena))
        taken, self._arena = self._arena[:num_bytes], self._arena[reserved:]
        return taken

    def linear(self, inputs: Tensor, weight: TiledWeight, *, residual: Tensor | None = None) -> Tensor:
        """inputs [R, in] @ weight [out, in]^T (+ residual [R, out]) -> [R, out]."""
        return self._linears(inputs, (weight,), residual)[0]

    def linears(self, inputs: Tensor, weights: Sequence[TiledWeight]) -> list[Tensor]:
        """`linear` for up to three weights that read the same inputs, in one call."""
        return self._linears(inputs, weights, None)

    def _linears(self, inputs: Tensor, weights: Sequence[TiledWeight], residual: Tensor | None) -> list[Tensor]:
        inputs = _plain(inputs, torch.float32)
        assert len(weights) <= MAX_PARTS, len(weights)
        for weight in weights:
            assert inputs.shape[1] == weight.in_features, (inputs.shape, weight.name, weight.in_features)
        outputs = [inputs.new_empty(len(inputs), weight.out_features) for weight in weights]
        if residual is not None:
            residual = _plain(residual, torch.float32)
            assert residual.shape == outputs[0].shape, (residual.shape, outputs[0].shape)
        pairs: list[int | None] = [None] * (2 * MAX_PARTS)
        pairs[: 2 * len(weights) : 2] = [weight.address for weight in weights]
        pairs[1 : 2 * len(weights) : 2] = [output.data_ptr() for output in outputs]
        kept = (inputs, residual, outputs)
        self._call("linears", inputs.data_ptr(), len(inputs), _pointer(residual), *pairs, kept=kept)
        return outputs

    def gated_linear(self, inputs: Tensor, gate: TiledWeight, up: TiledWeight, *, activation: str) -> Tensor:
        """activation(inputs @ gate^T) * (inputs @ up^T): [R, in] -> [R, out]."""
        inputs = _plain(inputs, torch.float32)
        assert gate.shape == up.shape == (gate.out_features, inputs.shape[1]), (inputs.shape, gate.shape, up.shape)
        outputs = inputs.new_empty(len(inputs), gate.out_features)
        addresses = inputs.data_ptr(), len(inputs), gate.address, up.address, outputs.data_ptr()
        self._call("gated_linear", *addresses, activation != "silu", kept=(inputs, outputs))
        return outputs

    def logits(self, inputs: Tensor, weight: TiledWeight, *, cap: float | None = None) -> Tensor:
        """`linear`, perhaps soft-capped: everything is float32 here."""
        return soft_cap(self.linear(inputs, weight), cap)

    def best(self, inputs: Tensor, weight: TiledWeight, *, cap: float | None = None) -> tuple[Tensor, Tensor]:
        """Largest logit of each row [R] and its index int64 [R]; logits without a cap are never stored."""
        if cap is not None:
            largest = self.logits(inputs, weight, cap=cap).max(dim=-1)
            return largest.values, largest.indices
        inputs = _plain(inputs, torch.float32)
        assert inputs.shape[1] == weight.in_features, (inputs.shape, weight.name, weight.in_features)
        values, indices = inputs.new_empty(len(inputs)), torch.empty(len(inputs), dtype=torch.int64)
        addresses = inputs.data_ptr(), len(inputs), weight.address, values.data_ptr(), indices.data_ptr()
        self._functions["best"](*addresses)
        return values, indices

    def embed(self, token_ids: Tensor, weight: TiledWeight, *, scale: float = 1.0) -> Tensor:
        """Rows token_ids [R] of weight [V, N], times a factor -> [R, N]."""
        token_ids = _plain(token_ids, torch.int64)
        num_rows = token_ids.shape[0]
        if num_rows and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < weight.out_features:
            raise IndexError(f"token_ids are not all within the {weight.out_features} rows of {weight.name}.")
        outputs = torch.empty((num_rows, weight.in_features), dtype=torch.float32)
        self._functions["embed"](token_ids.data_ptr(), num_rows, weight.address, outputs.data_ptr())
        return outputs if scale == 1.0 else outputs * scale

    def gated(self, inputs: Tensor, factors: Tensor, *, activation: str) -> Tensor:
        """activation(inputs) * factors, of one shape."""
        inputs, factors = _plain(inputs, torch.float32), _plain(factors, torch.float32)
        assert inputs.shape == factors.shape, (inputs.shape, factors.shape)
        outputs = torch.empty_like(inputs)
        addresses = inputs.data_ptr(), factors.data_ptr(), outputs.data_ptr()
        self._call("gated", *addresses, inputs.numel(), activation != "silu", kept=(inputs, factors, outputs))
        return outputs

    def pack_experts(self, gate_up: PackedWeight, down: PackedWeight) -> list[ExpertWeights]:
        """One entry an expert, from gate_up [E, 2I, N] and down [E, N, I]; the numbers are kept in float32."""
        wide_gate_up, wide_down = gate_up.dequantize(torch.float32), down.dequantize(torch.float32)
        experts = []
        for each_gate_up, each_down in zip(wide_gate_up, wide_down, strict=True):
            gate, up = each_gate_up.chunk(2)
            packed_gate, packed_up = (self.pack(DenseWeight(gate_up.name, half)) for half in (gate, up))
            experts.append(ExpertWeights(packed_gate, packed_up, self.pack(DenseWeight(down.name, each_down))))
        return experts

    def experts(
        self, inputs: Tensor, weights: Sequence[ExpertWeights], chosen: Tensor, shares: Tensor, *, activation: str
    ) -> Tensor:
        """Sum over k of shares[r, k] * down(activation(gate x) * up x), experts of a row in ascending order."""
        outputs = torch.zeros_like(inputs)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            gate, up, down = weights[expert]
            fed = self.linear(self.gated_linear(inputs[rows], gate, up, activation=activation), down)
            outputs.index_add_(0, rows, fed * shares[rows, slots, None])
        return outputs

    def rms_norm(self, inputs: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension of [R, N]."""
        return self._norm(inputs, weight, None, eps, 1.0)

    def rms_norm_add(
        self, inputs: Tensor, weight: Tensor, residual: Tensor, *, eps: float, scale: float = 1.0
    ) -> Tensor:
        """(residual + rms_norm(inputs)) * scale, [R, N]."""
        assert inputs.shape == residual.shape, (inputs.shape, residual.shape)
        return self._norm(inputs, weight, _plain(residual, torch.float32), eps, scale)

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

    def _norm(self, inputs: Tensor, weight: Tensor, residual: Tensor | None, eps: float, scale: float) -> Tensor:
        inputs, weight = _plain(inputs, torch.float32), _plain(weight, torch.float32)
        outputs = torch.empty_like(inputs)
        size = weight.shape[0]
        assert inputs.shape[-1] == size, (inputs.shape, size)
        addresses = inputs.data_ptr(), weight.data_ptr(), _pointer(residual), outputs.data_ptr()
        kept = (inputs, weight, residual, outputs)
        self._call("rms_norm", *addresses, inputs.numel() // size, size, eps, scale, kept=kept)
        return outputs

    def head_norm_rope(
        self, heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, *, eps: float
    ) -> Tensor:
        """Norm over each head of [R, H, D] (unless weight is None), then rotate the pairs (i, i + D/2)."""
        heads, positions = _plain(heads, torch.float32), _plain(positions, torch.int64)
        cos, sin = _plain(cos, torch.float32), _plain(sin, torch.float32)
        outputs = torch.empty_like(heads)
        addresses = (heads.data_ptr(), _pointer(weight), cos.data_ptr(), sin.data_ptr(), positions.data_ptr())
        kept = (heads, weight, cos, sin, positions, outputs)
        self._call("head_norm_rope", *addresses, outputs.data_ptr(), *heads.shape, eps, kept=kept)
        return outputs

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
        """Store keys and values [R, G, D] at slot position mod P of each row's page."""
        keys, values = _plain(keys, torch.float32), _plain(values, torch.float32)
        seats, positions = _plain(seats, torch.int64), _plain(positions, torch.int64)
        tensors = (*_in_place(cache), keys, values, seats, positions)
        _, page_size, num_groups, head_size = cache.keys.shape
        shape = keys.shape[0], page_size, cache.table.shape[1], num_groups * head_size
        self._call("write_cache", *(tensor.data_ptr() for tensor in tensors), *shape, kept=tensors)

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
        queries, spans = _plain(queries, torch.float32), _plain(spans, torch.int32)
        cached = tuple(tensor.data_ptr() for tensor in _in_place(cache))
        if fresh_k is not None and fresh_v is not None:
            fresh_k, fresh_v = _plain(fresh_k, torch.float32), _plain(fresh_v, torch.float32)
        outputs = torch.empty_like(queries)
        num_rows, num_heads, head_size = queries.shape
        _, page_size, num_groups, _ = cache.keys.shape
        shape = num_rows, num_heads, num_groups, head_size, page_size, cache.table.shape[1]
        fresh = _pointer(fresh_k), _pointer(fresh_v)
        addresses = queries.data_ptr(), *cached, *fresh, spans.data_ptr(), outputs.data_ptr()
        kept = (queries, cache, fresh_k, fresh_v, spans, outputs)
        self._call("attention", *addresses, *shape, scale, kept=kept)
        return outputs

    def walk(self, slots: SlotWalk, starts: WalkStarts, sampling: Sampling | None) -> Walked:
        """Slot by slot; spare requests too."""
        return walk_stepwise(slots, starts, sampling, self.sampler)


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as C reads it: of `dtype`, rows one after another."""
    assert tensor.dtype is dtype, f"{tensor.dtype} where {dtype} is due"
    return tensor.contiguous()


def _in_place(cache: LayerCache) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors of a cache, as C reads and writes them: copies would be another cache."""
    assert cache.keys.dtype is cache.values.dtype is torch.float32, (cache.keys.dtype, cache.values.dtype)
    assert cache.table.dtype is torch.int32, cache.table.dtype
    assert all(tensor.is_contiguous() for tensor in cache.tensors), "the cache is used in place"
    return cache.tensors


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def chosen_num_threads() -> int:
    """$OUTRIDER_THREADS, or as many as there are cores this process may use."""
    chosen = os.environ.get("OUTRIDER_THREADS", "")
    if not chosen:
        return min(num_usable_cores() or 1, MAX_THREADS)
    num_threads = int(chosen) if re.fullmatch("[0-9]{1,9}", chosen) else 0
    if not 1 <= num_threads <= MAX_THREADS:
        raise ConfigError(f"OUTRIDER_THREADS={chosen!r} is not a number of threads; give 1 to {MAX_THREADS}.")
    return num_threads


def load_cpu_kernels(cache_dir: Path, compilers: list[tuple[str, ...]] | None = None) -> CpuKernels:
    """Compile cpu.c into cache_dir where that was not done yet, and load it; NotCompiledError where no compiler can."""
    num_threads = chosen_num_threads()
    return CpuKernels(load_library(cache_dir, compilers), num_threads=num_threads)
