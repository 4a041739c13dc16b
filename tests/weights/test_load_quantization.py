"""Rounding while loading: which form comes of which matrix, and how near it is.

Seen red: rows of a second piece left out, int4 scales of the wrong sign, a packed matrix rounded again.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.weights import load_quantization
from outrider.weights.load_quantization import (
    LoadQuantization,
    check_quantization,
    int8_blocks,
    quantize_int4,
)
from outrider.weights.low_bit import Int4Weight
from outrider.weights.packed import BlockInt8Weight, DenseWeight

CPU = torch.device("cpu")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def quantized(kind: str, values: Tensor, *, for_low_bit: bool) -> BlockInt8Weight | DenseWeight:
    return LoadQuantization(kind, for_low_bit, CPU)(DenseWeight("w", values))


def test_int4_by_hand() -> None:
    """The largest number, 4, becomes -8 with the scale -0.5; all others are whole steps of that."""
    row = [4.0, -3.5, 0.0, 1.0, -0.5, 0.2, 0.3, -1.5]
    weight = quantize_int4("w", torch.tensor([row, [0.0] * 8]), group_size=8)
    assert weight.scales.tolist() == [[-0.5], [1.0]]
    assert weight.packed.dtype == torch.int32
    expected = [[4.0, -3.5, 0.0, 1.0, -0.5, 0.0, 0.5, -1.5], [0.0] * 8]
    assert weight.dequantize(torch.float32).tolist() == expected


def test_int4_is_within_a_step() -> None:
    numbers = normal(16, 96)
    weight = quantize_int4("w", numbers, group_size=32)
    scales = weight.scales.float().abs()
    error = (weight.dequantize(torch.float32) - numbers).abs().view(16, 3, 32).amax(dim=-1)
    # The other end of the scale has no whole step more: up to one step is cut there.
    assert bool((error <= scales * 1.05).all())
    means = (weight.dequantize(torch.float32) - numbers).abs().view(16, 3, 32).mean(dim=-1)
    assert float((means / scales).mean()) == pytest.approx(0.25, abs=0.02)
    assert weight.scales.dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [3, 8192])
def test_forms_for_blocks_and_for_low_bits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_quantization, "ROWS_AT_A_TIME", rows)
    values = normal(8, 64)
    blocks, whole = (quantized("int8", values, for_low_bit=low) for low in (False, True))
    assert isinstance(blocks, BlockInt8Weight)
    assert isinstance(whole, BlockInt8Weight)
    assert (blocks.group_size, whole.group_size) == (32, 64)
    for weight, error in ((blocks, 0.02), (whole, 0.025)):
        assert float((weight.dequantize(torch.float32) - values).abs().max()) < error
    unpacked, packed = (quantized("int4", values, for_low_bit=low) for low in (False, True))
    assert isinstance(unpacked, BlockInt8Weight)
    assert isinstance(packed, Int4Weight)
    assert torch.equal(unpacked.dequantize(torch.float32), packed.dequantize(torch.float32))
    assert torch.equal(int8_blocks(packed).values, unpacked.values)
    assert float((packed.dequantize(torch.float32) - values).abs().mean()) < 0.12


@pytest.mark.parametrize("kind", load_quantization.QUANTIZATIONS)
def test_what_is_packed_or_has_no_whole_groups_stays(kind: str) -> None:
    quantize = LoadQuantization(kind, True, CPU)
    packed, int4 = quantized("int8", normal(4, 32), for_low_bit=False), quantize_int4("w", normal(4, 32), group_size=32)
    odd = DenseWeight("w", normal(4, 40))
    for weight in (packed, int4, odd):
        assert quantize(weight) is weight


def test_nothing_needs_numbers_on_the_meta_device() -> None:
    values = torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    for kind in load_quantization.QUANTIZATIONS:
        assert LoadQuantization(kind, True, torch.device("meta"))(DenseWeight("w", values)).shape == (8, 64)


def test_other_names_are_refused_with_the_choices() -> None:
    check_quantization(None)
    check_quantization("int4")
    with pytest.raises(ConfigError, match="drafter_quantization='int3' is unknown; choose one of int8, int4"):
        check_quantization("int3")
