"""Packed weights turn back into numbers exactly."""

from __future__ import annotations

import torch

from outrider.weights.packed import BlockInt8Weight, DenseWeight, quantize_int8


def test_blocks_by_hand() -> None:
    weight = BlockInt8Weight(
        "w",
        torch.tensor([[1, -2, 3, 4]], dtype=torch.int8),
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([[0.25, -1.0]]),
        group_size=2,
    )
    assert weight.shape == (1, 4)
    assert weight.dequantize(torch.float32).tolist() == [[0.75, -0.75, 5.0, 7.0]]
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert weight.values.tolist() == [[1, -2, 3, 4]]  # dequantising leaves the stored block alone


def test_dense_keeps_its_shape() -> None:
    weight = DenseWeight("w", torch.tensor([[1.0, 2.0]]))
    assert weight.shape == (1, 2)
    assert weight.dequantize(torch.float16).tolist() == [[1.0, 2.0]]


def test_quantising_is_within_half_a_step() -> None:
    numbers = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    weight = quantize_int8("w", numbers, group_size=32)
    error = (weight.dequantize(torch.float32) - numbers).abs().view(16, 3, 32)
    # Half a step of rounding, and up to 127 steps times 2^-11 because the scale is rounded to float16.
    assert (error <= weight.scales[..., None] * (0.5 + 127 * 2**-11 * 1.01)).all()
    assert weight.values.min() >= -127
    assert torch.equal(weight.scales, weight.scales.to(torch.float16).float())


def test_zeros_stay_zeros() -> None:
    weight = quantize_int8("w", torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, -2.0, 3.0, 4.0]]), group_size=4)
    numbers = weight.dequantize(torch.float32)
    assert torch.isfinite(numbers).all()
    assert numbers[0, :4].tolist() == [0.0] * 4
