"""Which stored weights have a low-bit form, and that it says the same numbers.

Seen red: low and high bits swapped, the two runs of a group swapped, a format with offsets taken for one without.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.kernels.low_bit import LowBitMatrix, joined, low_bit_matrix
from outrider.weights.load_quantization import QUANTIZATIONS, LoadQuantization, quantize_int4
from outrider.weights.low_bit import Int4Weight
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight, quantize_int8

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(kind: str, *shape: int, seed: int = 0) -> PackedWeight:
    return LoadQuantization(kind, True, CPU)(DenseWeight("w", normal(*shape, seed=seed)))


def matrix(weight: PackedWeight) -> LowBitMatrix:
    found = low_bit_matrix(weight, CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_dequantised_numbers(kind: str, dtype: torch.dtype) -> None:
    weight = stored(kind, 10, 256)
    found = matrix(weight)
    assert found.shape == (10, 256)
    assert found.is_int4 == (kind == "int4")
    assert found.values.nbytes == 10 * (128 if kind == "int4" else 256)
    ids = torch.tensor([7, 0, 7])
    assert torch.equal(found.rows(ids, dtype), weight.dequantize(dtype)[ids])


def test_where_the_numbers_of_a_group_lie() -> None:
    weight = quantize_int4("w", (torch.arange(32) % 16 - 8.0).repeat(1, 4), group_size=32)
    values = matrix(weight).values.view(4, 16)
    expected = torch.arange(16, dtype=torch.uint8) * 17  # both halves count up to the same numbers
    assert torch.equal(values, expected.expand(4, 16))
    changed = matrix(quantize_int4("w", torch.tensor([-8.0] + [0.0] * 15 + [1.0] * 16).repeat(1, 4), group_size=32))
    assert changed.values[0, :2].tolist() == [0x90, 0x98]


def test_formats_without_a_kernel_have_none() -> None:
    int8, int4 = quantize_int8("w", normal(4, 128), group_size=128), quantize_int4("w", normal(4, 128), group_size=32)
    assert low_bit_matrix(int8, CPU) is not None
    assert low_bit_matrix(int4, CPU) is not None
    without: list[PackedWeight] = [
        DenseWeight("w", normal(4, 128)),
        quantize_int8("w", normal(4, 128), group_size=32),
        replace(int8, offsets=torch.zeros(4, 1)),
        quantize_int4("w", normal(4, 160), group_size=32),  # no whole blocks
        quantize_int4("w", normal(4, 128), group_size=64),
        Int4Weight("w", int4.packed, int4.scales.float(), None, 32),
        Int4Weight("w", int4.packed, int4.scales, torch.zeros(1, 4, dtype=torch.int32), 32),
        Int4Weight("w", int4.packed[None], int4.scales[None], None, 32),
    ]
    assert [low_bit_matrix(weight, CPU) for weight in without] == [None] * len(without)
    assert isinstance(int8, BlockInt8Weight)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_parts_of_joined_matrices_lie_together(kind: str) -> None:
    weights = [matrix(stored(kind, rows, 128, seed=rows)) for rows in (3, 5)]
    together = joined(weights)
    assert together.shape == (8, 128)
    for part, weight in zip(together.split([3, 5]), weights, strict=True):
        assert torch.equal(part.values, weight.values)
        assert torch.equal(part.scales, weight.scales)
        assert part.values.untyped_storage().data_ptr() == together.values.untyped_storage().data_ptr()
