"""Turn GGUF blocks into int8 values with float32 scales and offsets, exactly: dequantising gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GgmlType

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.gguf_file import GgufTensor
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight

Array = npt.NDArray[Any]
Parts = tuple[Array, Array, Array | None]
"""values int8 [blocks, block_size], scales float32 [blocks, groups], offsets float32 [blocks, groups] or None."""


def unpack_tensor(tensor: GgufTensor, *, name: str) -> PackedWeight:
    """Return the tensor under a new name: int8 blocks where the format is one, else plain numbers."""
    if tensor.type in _DENSE:
        return DenseWeight(name, _dense(tensor))
    if tensor.type in _BLOCKS and len(tensor.shape) == 2:
        decode, group_size = _BLOCKS[tensor.type]
        return _block_weight(tensor, decode=decode, name=name, group_size=group_size)
    try:
        values = quants.dequantize(_rows(tensor), tensor.type)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"tensor {tensor.name} has type {tensor.type.name}, which cannot be read."
        ) from error
    return DenseWeight(name, torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)))


def _dense(tensor: GgufTensor) -> torch.Tensor:
    # A copy, because the mapped file is read-only and torch has no read-only tensors.
    return torch.from_numpy(tensor.raw.copy()).view(_DENSE[tensor.type]).reshape(tensor.shape)


def _rows(tensor: GgufTensor) -> Array:
    return tensor.raw.reshape(*tensor.shape[:-1], -1)


def _block_weight(
    tensor: GgufTensor, *, decode: Callable[[Array], Parts], name: str, group_size: int
) -> BlockInt8Weight:
    _, block_bytes = GGML_QUANT_SIZES[tensor.type]
    values, scales, offsets = decode(tensor.raw.reshape(-1, block_bytes))
    out_features, in_features = tensor.shape
    grouped_shape = (out_features, in_features // group_size)
    for part in (scales, offsets):
        if part is not None and not np.isfinite(part).all():
            raise WeightsError(f"tensor {tensor.name} has scales that are not finite; the file is corrupt.")
    return BlockInt8Weight(
        name=name,
        values=torch.from_numpy(values.reshape(out_features, in_features)),
        scales=torch.from_numpy(scales.reshape(grouped_shape)),
        offsets=None if offsets is None else torch.from_numpy(offsets.reshape(grouped_shape)),
        group_size=group_size,
    )


def _half(blocks: Array) -> Array:
    """Two bytes a block as one float16, widened: [blocks, 2] uint8 -> [blocks, 1] float32."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _nibbles(packed: Array, *, run: int) -> Array:
    """Split bytes into low and high halves: `run` low ones, then the same bytes' high ones. [blocks, 2 * bytes]."""
    runs = packed.reshape(packed.shape[0], -1, run)
    halves = np.empty((*runs.shape[:2], 2, run), dtype=np.uint8)
    np.bitwise_and(runs, 0x0F, out=halves[:, :, 0])
    np.right_shift(runs, 4, out=halves[:, :, 1])
    return halves.reshape(packed.shape[0], -1)


def _q8_0(blocks: Array) -> Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks[:, :2]), None


def _q4_0(blocks: Array) -> Parts:
    return _nibbles(blocks[:, 2:], run=16).view(np.int8) - np.int8(8), _half(blocks[:, :2]), None


def _q5_0(blocks: Array) -> Parts:
    fifth_bits = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    values = _nibbles(blocks[:, 6:], run=16) | (fifth_bits << 4)
    return values.view(np.int8) - np.int8(16), _half(blocks[:, :2]), None


def _q4_k(blocks: Array) -> Parts:
    # Twelve bytes hold eight six-bit scales and eight six-bit minima; the last four groups' are in two pieces.
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six_bit_scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    six_bit_minima = np.concatenate([middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)], axis=1)
    scales = _half(blocks[:, 0:2]) * six_bit_scales.astype(np.float32)
    offsets = -(_half(blocks[:, 2:4]) * six_bit_minima.astype(np.float32))
    return _nibbles(blocks[:, 16:], run=32).view(np.int8), scales, offsets


def _q6_k(blocks: Array) -> Parts:
    low = _nibbles(blocks[:, :128], run=64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    values = low | ((pairs & 0x03) << 4).reshape(low.shape)
    sub_scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return values.view(np.int8) - np.int8(32), _half(blocks[:, 208:210]) * sub_scales, None


_DENSE = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}
_BLOCKS: dict[GgmlType, tuple[Callable[[Array], Parts], int]] = {
    GgmlType.Q4_0: (_q4_0, 32),
    GgmlType.Q5_0: (_q5_0, 32),
    GgmlType.Q8_0: (_q8_0, 32),
    GgmlType.Q4_K: (_q4_k, 32),
    GgmlType.Q6_K: (_q6_k, 16),
}
