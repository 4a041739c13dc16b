"""The set for CUDA on matrices of few bits, against torch on the same numbers.

Seen red: q, k and v in three products, the gate's two matrices swapped, a table's rows unscaled.
"""

from __future__ import annotations

import pytest
import torch

from outrider.kernels import gpu
from outrider.kernels.gpu import GpuKernels
from outrider.kernels.low_bit import LowBitMatrix
from outrider.weights.load_quantization import QUANTIZATIONS, LoadQuantization
from outrider.weights.packed import DenseWeight, PackedWeight
from tests.kernels.triton_mode import DEVICE, DTYPE, TWIN, assert_near, normal

NUM_INPUTS = 128
KERNELS = GpuKernels(DTYPE, DEVICE)


def stored(kind: str | None, num_outputs: int, *, seed: int = 0) -> PackedWeight:
    """A matrix whose products are about 1 in size."""
    plain = DenseWeight("w", normal(num_outputs, NUM_INPUTS, seed=seed) * NUM_INPUTS**-0.5)
    return plain if kind is None else LoadQuantization(kind, KERNELS.reads_low_bit, DEVICE)(plain)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_products_are_those_of_the_dequantised_matrix(kind: str) -> None:
    weight, inputs = stored(kind, 40), normal(3, NUM_INPUTS, seed=1)
    ours, twin = KERNELS.pack(weight), TWIN.pack(weight)
    assert isinstance(ours, LowBitMatrix)
    residual = normal(3, 40, seed=2)
    assert_near(KERNELS.linear(inputs, ours, residual=residual), TWIN.linear(inputs, twin, residual=residual))
    logits = KERNELS.logits(inputs, ours, cap=2.0)
    assert_near(logits, TWIN.logits(inputs, twin, cap=2.0))
    values, ids = KERNELS.best(inputs, ours, cap=2.0)
    assert torch.equal(values, logits.amax(dim=-1))
    assert torch.equal(ids, logits.argmax(dim=-1))
    tokens = torch.tensor([39, 0], device=DEVICE)
    assert_near(KERNELS.embed(tokens, ours, scale=3.0), TWIN.embed(tokens, twin, scale=3.0))


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_matrices_packed_together_take_one_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, inputs = [stored(kind, num, seed=num) for num in (40, 8, 8)], normal(3, NUM_INPUTS, seed=1)
    calls, product = [], gpu.low_bit_product
    monkeypatch.setattr(gpu, "low_bit_product", lambda *given, **how: calls.append(given) or product(*given, **how))
    found = KERNELS.linears(inputs, KERNELS.pack_together(weights))
    for ours, weight in zip(found, weights, strict=True):
        assert_near(ours, TWIN.linear(inputs, TWIN.pack(weight)))
    assert len(calls) == 1
    gate, up = KERNELS.pack_together(weights[1:])
    twins = [TWIN.pack(weight) for weight in weights[1:]]
    gated = KERNELS.gated_linear(inputs, gate, up, activation="silu")
    assert_near(gated, TWIN.gated_linear(inputs, *twins, activation="silu"))


def test_kinds_may_be_mixed() -> None:
    weights, inputs = [stored(kind, 24, seed=3) for kind in (None, "int8", "int4")], normal(3, NUM_INPUTS, seed=1)
    for chosen in (weights, weights[1:], weights[:2]):
        for ours, weight in zip(KERNELS.linears(inputs, KERNELS.pack_together(chosen)), chosen, strict=True):
            assert_near(ours, TWIN.linear(inputs, TWIN.pack(weight)))
    gate, up = KERNELS.pack_together(weights[:2])
    twins = [TWIN.pack(weight) for weight in weights[:2]]
    gated = KERNELS.gated_linear(inputs, gate, up, activation="gelu_tanh")
    assert_near(gated, TWIN.gated_linear(inputs, *twins, activation="gelu_tanh"))
