"""Products of int8 and int4 weights in Triton against dequantising and torch, and that a row's bits stand alone.

The twin is `dequantize` and torch. Seen red: high bits read for the same inputs as low ones, int8 sums without their
scale, the scales of another block.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.kernels.low_bit import LowBitMatrix, low_bit_matrix
from outrider.kernels.matmul_low_bit import choose_low_bit_tiles, low_bit_best, low_bit_product
from outrider.kernels.matmul_sizes import Limits
from outrider.weights.load_quantization import QUANTIZATIONS, LoadQuantization
from outrider.weights.packed import DenseWeight, PackedWeight
from tests.kernels.triton_mode import DEVICE, DTYPE

HOPPER_LIMITS = Limits(132, 227 << 10, is_hopper=True)
SMALL_LIMITS = Limits(82, 99 << 10, is_hopper=False)
DRAFTER_31B = {"fc": (5376, 32_256), "q": (8192, 5376), "down": (5376, 10_752), "head": (262_144, 5376)}


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device=DEVICE)
    return (values * shape[-1] ** -0.25).to(DTYPE)


def stored(kind: str, *shape: int, seed: int = 1) -> PackedWeight:
    return LoadQuantization(kind, True, DEVICE)(DenseWeight("w", noise(*shape, seed=seed)))


def matrix(weight: PackedWeight) -> LowBitMatrix:
    packed = low_bit_matrix(weight, DEVICE)
    assert packed is not None
    return packed


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 20])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(70, 128), (64, 384), (33, 640)])
def test_product_equals_the_dequantised_one(kind: str, num_rows: int, num_outputs: int, num_inputs: int) -> None:
    inputs, weight = noise(num_rows, num_inputs), stored(kind, num_outputs, num_inputs)
    residual = noise(num_rows, num_outputs, seed=2)
    expected = inputs.double() @ weight.dequantize(torch.float64, DEVICE).T
    found = low_bit_product(inputs, matrix(weight))
    assert found.dtype == DTYPE
    assert relative_error(found, expected) < 4e-3
    assert torch.equal(low_bit_product(inputs, matrix(weight), residual=residual), residual + found)
    capped = low_bit_product(inputs, matrix(weight), cap=0.5, dtype=torch.float32)
    assert capped.dtype == torch.float32
    assert relative_error(capped, 0.5 * torch.tanh(expected / 0.5)) < 4e-3


@pytest.mark.parametrize("num_inputs", [96, 160, 224])
def test_int8_inputs_need_not_fill_a_tile(num_inputs: int) -> None:
    inputs, weight = noise(3, num_inputs), stored("int8", 70, num_inputs)
    expected = inputs.double() @ weight.dequantize(torch.float64, DEVICE).T
    assert relative_error(low_bit_product(inputs, matrix(weight)), expected) < 4e-3


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_every_number_and_its_scale_is_where_it_belongs(kind: str) -> None:
    """Rows with a single 1 read the matrix number by number."""
    weight = stored(kind, 66, 256)
    found = low_bit_product(torch.eye(256, dtype=DTYPE, device=DEVICE), matrix(weight), dtype=torch.float32)
    numbers = weight.dequantize(torch.float32, DEVICE)
    assert torch.equal(found.T, numbers if kind == "int8" else numbers.to(DTYPE).float())


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("cap", [None, 2.0])
def test_best_is_the_largest_logit(kind: str, cap: float | None) -> None:
    inputs, weight = noise(5, 128), matrix(stored(kind, 300, 128))
    logits = low_bit_product(inputs, weight, cap=cap, dtype=torch.float32)
    values, ids = low_bit_best(inputs, weight, cap=cap)
    assert torch.equal(values, logits.amax(dim=-1))
    assert torch.equal(ids, logits.argmax(dim=-1))


def test_rows_change_the_row_tile_alone() -> None:
    for limits in (HOPPER_LIMITS, SMALL_LIMITS):
        for is_int4 in (False, True):
            found = [choose_low_bit_tiles(rows, 5376, limits, is_int4=is_int4) for rows in (1, 16, 17, 64, 100, 4096)]
            assert [tiles.rows for tiles in found] == [16, 16, 32, 64, 128, 128]
            for tiles in found:
                assert tiles.depth in ((128,) if is_int4 else (64, 128))
                stage_bytes = tiles.outputs * tiles.depth // (2 if is_int4 else 1) + tiles.rows * tiles.depth * 2
                assert stage_bytes * tiles.num_stages < limits.shared_bytes, tiles


def check_rows(call: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    """Every row, at many numbers of rows, has the bits that it has among 256 and alone."""
    together = call(inputs)
    for num_rows in [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 200, 256]:
        assert torch.equal(call(inputs[:num_rows]), together[:num_rows]), num_rows
    alone = torch.cat([call(inputs[row : row + 1]) for row in range(0, len(inputs), 17)])
    assert torch.equal(alone, together[::17])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_every_number_is_where_it_belongs_on_a_gpu(kind: str) -> None:
    """In bfloat16, whose bit patterns differ."""
    test_every_number_and_its_scale_is_where_it_belongs(kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("name", DRAFTER_31B)
def test_products_of_a_31b_drafter_on_a_gpu(name: str, kind: str) -> None:
    num_outputs, num_inputs = DRAFTER_31B[name]
    weight, inputs = stored(kind, num_outputs, num_inputs), noise(256, num_inputs)
    packed = matrix(weight)
    expected = inputs.double() @ weight.dequantize(DTYPE, DEVICE)[:8192].double().T
    found = low_bit_product(inputs, packed, dtype=torch.float32)
    assert relative_error(found[:, :8192], expected) < 4e-3
    check_rows(lambda rows: low_bit_product(rows, packed, dtype=torch.float32), inputs)
    if name == "head":
        check_rows(lambda rows: low_bit_best(rows, packed, cap=30.0)[1], inputs)
        logits = low_bit_product(inputs[:40], packed, cap=30.0, dtype=torch.float32)
        values, ids = low_bit_best(inputs[:40], packed, cap=30.0)
        assert torch.equal(values, logits.amax(dim=-1))
        assert torch.equal(ids, logits.argmax(dim=-1))
