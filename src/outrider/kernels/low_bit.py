"""Matrices in fewer bits as the GPU kernels multiply them. No Triton here: their bytes are counted without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.weights.low_bit import Int4Weight
from outrider.weights.packed import BlockInt8Weight, PackedWeight

INT4_GROUP = 32  # inputs that share a scale
INT4_BLOCK = 128  # inputs that are multiplied in one step
_ROWS_AT_A_TIME = 8192  # of a matrix that is laid out anew, so that its unpacked copy stays small


@dataclass(frozen=True)
class LowBitMatrix:
    """A matrix [out, in] of int8 or int4 numbers and their scales.

    int8: weight[o, i] = values[o, i] * scales[o, 0]. int4: weight[o, i] = (u - 8) * scales[o, i // 32], where the 16
    bytes of a group hold its first 16 numbers in their low bits and its last 16 in their high ones: a tile of bytes is
    two tiles of numbers that have the same scales.
    """

    values: Tensor  # int8 [out, in]; uint8 [out, in / 2] of int4
    scales: Tensor  # float32 [out, 1]; bfloat16 [out, in / 32] of int4

    @property
    def is_int4(self) -> bool:
        """Two numbers a byte."""
        return self.values.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.values.shape[0], self.values.shape[1] * (2 if self.is_int4 else 1)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of rows `ids` (int64 [n]), computed in float32 and rounded once, [n, in]."""
        values, scales = self.values[ids], self.scales[ids].to(torch.float32)
        if self.is_int4:
            groups = values.view(len(ids), -1, INT4_GROUP // 2)
            values = torch.cat((groups & 15, groups >> 4), dim=-1).to(torch.int8) - 8
        grouped = values.reshape(len(ids), scales.shape[1], -1).to(torch.float32)
        return (grouped * scales[..., None]).view(len(ids), -1).to(dtype)

    def split(self, num_outputs: Sequence[int]) -> list[LowBitMatrix]:
        """Parts of so many outputs each, which keep lying together."""
        sizes = list(num_outputs)
        parts = zip(torch.split(self.values, sizes), torch.split(self.scales, sizes), strict=True)
        return [LowBitMatrix(values, scales) for values, scales in parts]


def low_bit_matrix(weight: PackedWeight, device: torch.device) -> LowBitMatrix | None:
    """A stored weight as kernels multiply it; None for formats that have to be dequantised.

    There are kernels for int8 with one scale an output, and for symmetric int4 with a bfloat16 scale for every 32
    inputs, of which there are whole blocks of 128.
    """
    if isinstance(weight, BlockInt8Weight):
        if weight.offsets is not None or weight.group_size != weight.shape[1]:
            return None
        return LowBitMatrix(weight.values.to(device).contiguous(), weight.scales.to(device).contiguous())
    if not isinstance(weight, Int4Weight) or len(weight.shape) != 2 or weight.zero_points is not None:
        return None
    is_known = weight.group_size == INT4_GROUP and weight.scales.dtype == torch.bfloat16
    if not is_known or weight.shape[1] % INT4_BLOCK:
        return None
    parts = [_halves_together(part.to(device)) for part in torch.split(weight.packed, _ROWS_AT_A_TIME)]
    return LowBitMatrix(torch.cat(parts), weight.scales.to(device).contiguous())


def _halves_together(words: Tensor) -> Tensor:
    """int32 [out, in / 8], eight numbers in a row each, lowest bits first -> uint8 [out, in / 2] of LowBitMatrix."""
    stored = words.contiguous().view(torch.uint8)
    numbers = torch.stack((stored & 15, stored >> 4), dim=-1).view(len(words), -1, 2, INT4_GROUP // 2)
    return (numbers[:, :, 0] | (numbers[:, :, 1] << 4)).reshape(len(words), -1)


def joined(matrices: Sequence[LowBitMatrix]) -> LowBitMatrix:
    """Matrices of one kind and input size, one after the other along the outputs."""
    return LowBitMatrix(
        torch.cat([matrix.values for matrix in matrices]), torch.cat([matrix.scales for matrix in matrices])
    )
