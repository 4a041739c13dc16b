"""Rounding plain matrices while they are loaded: a drafter may be quantised, since it cannot change the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.weights.low_bit import INT4_PER_WORD, Int4Weight, nibbles
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight, quantize_int8

QUANTIZATIONS = ("int8", "int4")
GROUP_SIZE = 32  # inputs that share a scale
ROWS_AT_A_TIME = 8192  # of a matrix, so that its float32 copy stays small


def check_quantization(kind: str | None) -> None:
    """ConfigError unless it is one of QUANTIZATIONS, or None."""
    if kind is not None and kind not in QUANTIZATIONS:
        raise ConfigError(
            f"drafter_quantization={kind!r} is unknown; choose one of {', '.join(QUANTIZATIONS)}, or leave it out."
        )


@dataclass(frozen=True)
class LoadQuantization:
    """Turns plain matrices into what a kernel set reads, computed on `device`."""

    kind: str
    """One of QUANTIZATIONS."""
    for_low_bit: bool
    """As `Kernels.reads_low_bit`: int8 with one scale an output, and int4; else int8 blocks of GROUP_SIZE for both."""
    device: torch.device

    def __call__(self, weight: PackedWeight) -> PackedWeight:
        """The matrix [out, in] in fewer bits; as it is where it is packed already or has no whole groups."""
        if type(weight) is not DenseWeight or weight.shape[-1] % GROUP_SIZE:
            return weight
        pieces = torch.split(weight.values.to(self.device), ROWS_AT_A_TIME)
        if self.kind == "int8":
            group_size = weight.shape[-1] if self.for_low_bit else GROUP_SIZE
            blocks = [quantize_int8(weight.name, piece, group_size=group_size) for piece in pieces]
            values, scales = (torch.cat(parts) for parts in zip(*((b.values, b.scales) for b in blocks), strict=True))
            return BlockInt8Weight(weight.name, values, scales, None, group_size)
        words = [quantize_int4(weight.name, piece, group_size=GROUP_SIZE) for piece in pieces]
        packed, scales = (torch.cat(parts) for parts in zip(*((w.packed, w.scales) for w in words), strict=True))
        int4 = Int4Weight(weight.name, packed, scales, None, GROUP_SIZE)
        return int4 if self.for_low_bit else int8_blocks(int4)


def quantize_int4(name: str, weight: Tensor, *, group_size: int) -> Int4Weight:
    """Round a float matrix [out, in] to whole numbers from -8 to 7 and a scale per group (as GGUF Q4_0).

    The number of largest size becomes -8, so that the scale may be negative. Scales are rounded to bfloat16 first: a
    product of the two is exact in float32. A group of zeros becomes zeros with scale 1.
    """
    out_features = weight.shape[0]
    grouped = weight.detach().to(torch.float32).view(out_features, -1, group_size)
    largest = grouped.gather(-1, grouped.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
    scales = (largest / -8.0).to(torch.bfloat16)
    scales = torch.where(scales != 0, scales, 1.0)
    rounded = (grouped / scales.to(torch.float32)[..., None]).round().clamp(-8, 7)
    unsigned = (rounded + 8).to(torch.int32).view(out_features, -1, INT4_PER_WORD)
    packed = torch.zeros_like(unsigned[..., 0])
    for place in range(INT4_PER_WORD):
        packed |= unsigned[..., place] << (4 * place)
    return Int4Weight(name, packed, scales, None, group_size)


def int8_blocks(weight: Int4Weight) -> BlockInt8Weight:
    """The same numbers, a whole byte each, for kernels that read int8 blocks."""
    values = nibbles(weight.packed)
    return BlockInt8Weight(weight.name, values, weight.scales.to(torch.float32), None, weight.group_size)
