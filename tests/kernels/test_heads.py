"""Heads step by step: what comes out, and what goes to the pages, by plain torch and by the compiled set.

Seen red: values without their norm; the queries' norm over the keys.
"""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.cpu import CpuKernels
from outrider.kernels.heads import HeadNorms, HeadRows
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.ops import Kernels
from outrider.kernels.reference import TorchKernels

HEAD_SIZE, EPS = 8, 1e-6


@pytest.fixture(params=["torch", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Both sets that take the steps one by one."""
    if request.param == "torch":
        return TorchKernels(torch.float32)
    compiled: CpuKernels = request.getfixturevalue("cpu_kernels")
    return compiled


def test_heads_are_made_step_by_step(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(3, n * HEAD_SIZE, generator=generator) for n in (4, 2, 2))
    norms = HeadNorms(*torch.randn(3, HEAD_SIZE, generator=generator))
    cos, sin = torch.randn(2, 9, HEAD_SIZE // 2, generator=generator)
    seats, positions = torch.tensor([0, -1, 0]), torch.tensor([7, 0, 2])

    def rotated(rows: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return kernels.head_norm_rope(rows.view(3, -1, HEAD_SIZE), norm, cos, sin, positions, eps=EPS)

    made = kernels.finish_heads(HeadRows(queries, keys, values), norms, cos, sin, positions, eps=EPS)
    normed = kernels.rms_norm(values.view(3, 2, HEAD_SIZE), norms.values, eps=EPS)
    for ours, expected in zip(made, (rotated(queries, norms.queries), rotated(keys, norms.keys), normed), strict=True):
        assert ours is not None
        assert torch.equal(ours, expected)

    written, expected_cache = (LayerCache.of_seats(*torch.zeros(2, 1, 8, 2, HEAD_SIZE)) for _ in range(2))
    kept = kernels.finish_heads(
        HeadRows(None, keys, keys), norms, cos, sin, positions, eps=EPS, cache=written, seats=seats
    )
    assert kept == (None, None, None)
    normed = kernels.rms_norm(keys.view(3, 2, HEAD_SIZE), norms.values, eps=EPS)
    kernels.write_cache(expected_cache, rotated(keys, norms.keys), normed, seats, positions)
    for ours, expected in zip(written.tensors, expected_cache.tensors, strict=True):
        assert torch.equal(ours, expected)

    unnormed = kernels.finish_heads(
        HeadRows(None, keys, values), HeadNorms(None, None, None), cos, sin, positions, eps=EPS
    )
    assert unnormed.keys is not None
    assert torch.equal(unnormed.keys, rotated(keys, None))
    assert torch.equal(unnormed.values, values.view(3, 2, HEAD_SIZE))
    alone = kernels.finish_heads(HeadRows(queries, None, None), norms, cos, sin, positions, eps=EPS)
    assert torch.equal(alone.queries, made.queries)
    assert alone[1:] == (None, None)


def test_a_norm_goes_with_the_sum_before_it(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, residual = torch.randn(2, 3, 16, generator=generator)
    weight, following = torch.randn(2, 16, generator=generator)
    hidden, normed = kernels.rms_norm_add_norm(inputs, weight, residual, following, eps=EPS, scale=0.5)
    assert torch.equal(hidden, kernels.rms_norm_add(inputs, weight, residual, eps=EPS, scale=0.5))
    assert torch.equal(normed, kernels.rms_norm(hidden, following, eps=EPS))
