"""Weights as they are stored: int8 blocks with float scales, or plain numbers, and how to turn either into numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockInt8Weight:
    """A matrix kept as int8 blocks along its input dimension.

    weight[o, i] = values[o, i] * scales[o, i // group_size] + offsets[o, i // group_size]
    (offsets is None where the format is symmetric). Exact in float32 for Q8_0, Q5_0, Q4_K and Q6_K.
    """

    name: str
    values: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out, in / group_size]
    offsets: Tensor | None  # float32 [out, in / group_size]
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return the numbers, [out, in]. Computed in float32, then rounded once to `dtype`."""
        out_features, in_features = self.shape
        grouped = self.values.to(device).view(out_features, -1, self.group_size).to(torch.float32)
        grouped *= self.scales.to(device)[..., None]
        if self.offsets is not None:
            grouped += self.offsets.to(device)[..., None]
        return grouped.view(out_features, in_features).to(dtype)


class DenseWeight:
    """A matrix or vector kept as plain numbers; base of the formats that are read as such (see low_bit.py)."""

    def __init__(self, name: str, values: Tensor) -> None:
        """`values` are floating point, [out, in] or [n] (or integers, of a table)."""
        self.name = name
        self._values = values

    @property
    def values(self) -> Tensor:
        """The numbers, as they are stored."""
        return self._values

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self._values.shape)

    def dequantize(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return the numbers in `dtype`."""
        return self.values.to(device=device, dtype=dtype)


PackedWeight = BlockInt8Weight | DenseWeight


def quantize_int8(name: str, weight: Tensor, *, group_size: int) -> BlockInt8Weight:
    """Round a float matrix [out, in] to symmetric int8 blocks: scale = max|w| / 127 per group (as GGUF Q8_0).

    Scales are rounded to float16 first, so that a file that stores them in two bytes loads the very same numbers. A
    group that is zero, or so small that its scale would be, becomes zeros with scale 1.
    """
    out_features, in_features = weight.shape
    grouped = weight.detach().to(torch.float32).view(out_features, -1, group_size)
    scales = (grouped.abs().amax(dim=-1) / 127.0).to(torch.float16).to(torch.float32)
    scales = torch.where(scales > 0, scales, 1.0)
    values = (grouped * (1.0 / scales)[..., None]).round().clamp(-127, 127).to(torch.int8)
    return BlockInt8Weight(name, values.view(out_features, in_features), scales, None, group_size)
