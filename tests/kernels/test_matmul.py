"""Products in Triton against torch, and that a row's bits do not depend on its company.

Interpreted products are the machine's own, so that bits are compared where sums are exact: on small whole numbers. On a
GPU they are compared on noise.
Seen red: splits that end elsewhere for another depth, a tile's rows counted from another tile, ties to the higher id,
NaN lost in the largest, the second matrix of a gate taken for the first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels import matmul
from outrider.kernels.gpu import GpuKernels
from outrider.kernels.matmul import Products, merged
from outrider.kernels.matmul_sizes import HOPPER
from tests.kernels.triton_mode import DEVICE, DTYPE

SHAPES_31B = {"qkv": (16_384, 5376), "o": (5376, 8192), "full o": (5376, 16_384), "down": (5376, 21_504)}
NARROW = {"few outputs": (640, 2048), "router": (128, 2816), "odd": (200, 712)}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return (values * shape[-1] ** -0.25).to(DEVICE, dtype)


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, DTYPE)


def products() -> Products:
    return Products(DEVICE)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("num_rows", [1, 5, 16, 20])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(70, 96), (64, 256), (40, 2048), (33, 300)])
def test_product_equals_torch(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    inputs, weight = noise(num_rows, num_inputs), noise(num_outputs, num_inputs, seed=1)
    residual = noise(num_rows, num_outputs, seed=2)
    expected = inputs.double() @ weight.double().T
    found = products().product(inputs, weight)
    assert found.dtype == DTYPE
    assert relative_error(found, expected) < 3e-3
    assert torch.equal(products().product(inputs, weight, residual=residual), residual + found)
    capped = products().product(inputs, weight, cap=0.5, dtype=torch.float32)
    assert capped.dtype == torch.float32
    assert relative_error(capped, 0.5 * torch.tanh(expected / 0.5)) < 1e-3


@pytest.mark.parametrize("is_silu", [False, True])
def test_gate_equals_torch(is_silu: bool) -> None:
    inputs, gate, up = noise(5, 96), noise(70, 96, seed=1), noise(70, 96, seed=2)
    first, second = (products().product(inputs, weight, splits=1).double() for weight in (gate, up))
    expected = (functional.silu(first) if is_silu else functional.gelu(first, approximate="tanh")) * second
    assert relative_error(products().gated_product(inputs, gate, up, is_silu=is_silu), expected) < 3e-3


@pytest.mark.parametrize("cap", [None, 2.0])
def test_best_is_the_largest_logit(cap: float | None) -> None:
    inputs, weight = noise(5, 96), noise(300, 96, seed=1)
    logits = products().product(inputs, weight, cap=cap, dtype=torch.float32, splits=1)
    values, ids = products().best(inputs, weight, cap=cap)
    assert torch.equal(values, logits.amax(dim=-1))
    assert torch.equal(ids, logits.argmax(dim=-1))


def test_ties_go_to_the_lower_id_and_a_nan_stays_one() -> None:
    inputs, weight = whole_numbers(3, 32), whole_numbers(300, 32, seed=1)
    inputs[0, 0] = 1.0
    weight[:] = weight[7]
    inputs[1, 3] = torch.nan
    inputs[2] = 0.0
    values, ids = products().best(inputs, weight)
    assert ids[[0, 2]].tolist() == [0, 0]
    assert values.isnan().tolist() == [False, True, False]
    weight[[140, 290], 0] += 1.0
    assert products().best(inputs, weight)[1][0] == 140


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(70, 96), (40, 2048), (33, 712)])
def test_a_row_is_the_same_in_any_company(num_outputs: int, num_inputs: int) -> None:
    """Exact sums here; noise on a GPU, below."""
    inputs, weight = whole_numbers(40, num_inputs), whole_numbers(num_outputs, num_inputs, seed=1)
    together = products().product(inputs, weight)
    for num_rows in (1, 3, 16, 17, 33):
        assert torch.equal(products().product(inputs[:num_rows], weight), together[:num_rows])


def test_matrices_that_lie_together_are_one() -> None:
    whole = noise(70, 32)
    first, second = whole[:30], whole[30:]
    together = merged((first, second))
    assert together is not None
    assert torch.equal(together, whole)
    assert merged((second, first)) is None
    assert merged((first, second.clone())) is None


def row_counts() -> list[int]:
    return [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 200, 256]


def check_rows(call: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    """Every row, at every number of rows, has the bits that it has among 256 and alone."""
    together = call(inputs)
    for num_rows in row_counts():
        assert torch.equal(call(inputs[:num_rows]), together[:num_rows]), num_rows
        assert torch.equal(call(inputs[-num_rows:].contiguous()), together[-num_rows:]), num_rows
    alone = torch.cat([call(inputs[row : row + 1]) for row in range(0, len(inputs), 17)])
    assert torch.equal(alone, together[::17])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SHAPES_31B, *NARROW])
def test_every_row_count_gives_the_same_bits_on_a_gpu(name: str) -> None:
    num_outputs, num_inputs = (SHAPES_31B | NARROW)[name]
    kernels, weight = products(), noise(num_outputs, num_inputs, seed=1)
    inputs = noise(256, num_inputs)
    check_rows(lambda rows: kernels.product(rows, weight), inputs)
    expected = inputs.double() @ weight.double().T
    assert relative_error(kernels.product(inputs, weight), expected) < 4e-3
    long = torch.cat([inputs, noise(1000, num_inputs, seed=3)])
    assert torch.equal(kernels.product(long, weight)[:256], kernels.product(inputs, weight))


@pytest.mark.gpu
def test_every_row_count_gives_the_same_gate_and_head_on_a_gpu() -> None:
    kernels, inputs = products(), noise(256, 5376)
    gate, up = noise(21_504, 5376, seed=1), noise(21_504, 5376, seed=2)
    set_of_kernels = GpuKernels(DTYPE, DEVICE)
    check_rows(lambda rows: set_of_kernels.gated_linear(rows, gate, up, activation="gelu_tanh"), inputs)
    head = noise(262_144, 5376, seed=3)
    check_rows(lambda rows: kernels.best(rows, head, cap=30.0)[1], inputs)
    values, ids = kernels.best(inputs[:40], head, cap=30.0)
    logits = set_of_kernels.logits(inputs[:40], head, cap=30.0)
    assert torch.equal(values, logits.amax(dim=-1))
    assert torch.equal(ids, logits.argmax(dim=-1))
    assert matmul.device_limits(0).is_hopper == (torch.cuda.get_device_capability() == HOPPER)
