"""Matrices kept in fewer bits than their numbers need: int4, 8-bit floats, NVFP4. Layouts: formats.md §6a and §6b.

Every type here is a `DenseWeight` whose numbers are worked out when they are asked for, so a kernel set that has no
product of its own for a format takes them as plain numbers. `dequantize` is the specification of each format. Matrices
may be stacked (experts): shapes are [..., out, in].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.weights.packed import DenseWeight, PackedWeight

INT4_PER_WORD = 8  # in an int32
_INT4_ZERO = 8  # q is stored as q + 8
NVFP4_GROUP = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class LowBitWeight(DenseWeight):
    """A weight whose numbers are computed in float32 each time they are read."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self._shape = shape

    @property
    def values(self) -> Tensor:
        """The numbers in float32, unpacked anew."""
        return self._unpack(torch.device("cpu"))

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., out, in) of the numbers, not of what is stored."""
        return self._shape

    def dequantize(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return the numbers [..., out, in]: computed in float32 on `device`, then rounded once to `dtype`."""
        if torch.device(device).type == "meta":  # where there is nothing to compute
            return torch.empty(self.shape, dtype=dtype, device=device)
        return self._unpack(torch.device(device)).to(dtype)

    @abstractmethod
    def _unpack(self, device: torch.device) -> Tensor:
        """The numbers in float32."""


class Int4Weight(LowBitWeight):
    """Four-bit whole numbers with a scale per group of inputs, as compressed-tensors' `pack-quantized` stores them.

    weight[o, i] = (q[o, i] - z[o, i // group_size]) * scales[o, i // group_size], q and z from -8 to 7, z = 0 without
    `zero_points`. Eight q follow each other along the inputs of a row in one word, lowest bits first; eight z likewise
    along the outputs.
    """

    def __init__(
        self,
        name: str,
        packed: Tensor,  # int32 [..., out, ceil(in / 8)]
        scales: Tensor,  # floating point [..., out, in / group_size]
        zero_points: Tensor | None,  # int32 [..., ceil(out / 8), in / group_size]
        group_size: int,
    ) -> None:
        super().__init__(name, (*scales.shape[:-1], scales.shape[-1] * group_size))
        self.packed, self.scales, self.zero_points, self.group_size = packed, scales, zero_points, group_size

    def _unpack(self, device: torch.device) -> Tensor:
        grouped = (*self.scales.shape, self.group_size)
        numbers = nibbles(self.packed.to(device))[..., : self.shape[-1]].reshape(grouped)
        if self.zero_points is not None:
            zeros = nibbles(self.zero_points.to(device).mT).mT[..., : self.shape[-2], :]
            numbers = numbers - zeros[..., None]
        return (numbers.to(torch.float32) * self.scales.to(device, torch.float32)[..., None]).reshape(self.shape)


class Float8Weight(LowBitWeight):
    """Eight-bit floats (e4m3) with a scale per matrix, per output or per block, as `float-quantized` stores them.

    weight[o, i] = stored[o, i] * scales[o // block[0], i // block[1]]; the last block of a row or column may be short.
    """

    def __init__(
        self,
        name: str,
        stored: Tensor,  # float8_e4m3fn [..., out, in]
        scales: Tensor,  # floating point [..., ceil(out / block[0]), ceil(in / block[1])]
        block: tuple[int, int],
    ) -> None:
        super().__init__(name, tuple(stored.shape))
        self.stored, self.scales, self.block = stored, scales, block

    def _unpack(self, device: torch.device) -> Tensor:
        scales = self.scales.to(device, torch.float32)
        for dim, extent in zip((-2, -1), self.block, strict=True):
            if scales.shape[dim] > 1:
                scales = scales.repeat_interleave(extent, dim=dim).narrow(dim, 0, self.shape[dim])
        return self.stored.to(device).to(torch.float32) * scales


class Nvfp4Weight(LowBitWeight):
    """Four-bit floats (e2m1) with an e4m3 scale for every 16 inputs and one float32 scale for all.

    weight[o, i] = e2m1[o, i] * (scales[o, i // 16] * global_scale), where ModelOpt stores global_scale; or
    (scales / global_scale), where compressed-tensors stores its reciprocal (`divides`). The even input of a byte is in
    its low bits; a nibble is the sign and an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    """

    def __init__(
        self,
        name: str,
        packed: Tensor,  # uint8 [..., out, in / 2]
        scales: Tensor,  # float8_e4m3fn [..., out, in / 16]
        global_scale: Tensor,  # float32 []
        *,
        divides: bool,
    ) -> None:
        super().__init__(name, (*packed.shape[:-1], 2 * packed.shape[-1]))
        self.packed, self.scales, self.global_scale, self.divides = packed, scales, global_scale, divides

    def _unpack(self, device: torch.device) -> Tensor:
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=device)
        packed = self.packed.to(device)
        numbers = table[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()]
        scales, global_scale = self.scales.to(device).to(torch.float32), self.global_scale.to(device, torch.float32)
        scales = scales / global_scale if self.divides else scales * global_scale
        return (numbers.view(*scales.shape, NVFP4_GROUP) * scales[..., None]).view(self.shape)


class ExpertStack(LowBitWeight):
    """Experts that are stored one by one, as the one stack that kernels take: [E, out, in].

    An expert may come in several matrices (gate and up), whose outputs follow each other.
    """

    def __init__(self, name: str, experts: Sequence[Sequence[PackedWeight]]) -> None:
        rows = sum(part.shape[0] for part in experts[0])
        super().__init__(name, (len(experts), rows, experts[0][0].shape[1]))
        self.experts = experts

    def _unpack(self, device: torch.device) -> Tensor:
        matrices = [
            torch.cat([part.dequantize(torch.float32, device) for part in expert], dim=0) for expert in self.experts
        ]
        return torch.stack(matrices)


def nibbles(words: Tensor) -> Tensor:
    """int32 [..., n] -> int8 [..., 8n], from -8 to 7, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (((words[..., None] >> shifts) & 15) - _INT4_ZERO).to(torch.int8).flatten(-2)
