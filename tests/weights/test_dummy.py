"""Weights made up when they are claimed. Seen red: no scale by inputs, one seed for all names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.errors import WeightsError
from outrider.weights.dummy import DummyWeights
from outrider.weights.loader import TensorClaims
from outrider.weights.packed import DenseWeight

CPU, META = torch.device("cpu"), torch.device("meta")


def values(name: str, shape: tuple[int, ...], *, source: str = "a") -> torch.Tensor:
    weight = DummyWeights(source, dtype=torch.float32, device=CPU).claim(name, shape)
    assert isinstance(weight, DenseWeight)
    return weight.values


def test_numbers_depend_on_source_and_name_alone() -> None:
    assert torch.equal(values("w", (8, 16)), values("w", (8, 16)))
    assert not torch.equal(values("w", (8, 16)), values("v", (8, 16)))
    assert not torch.equal(values("w", (8, 16)), values("w", (8, 16), source="b"))


def test_matrices_keep_the_size_of_what_passes_and_factors_are_about_1() -> None:
    inputs = torch.randn(32, 400, generator=torch.Generator().manual_seed(0))
    passed = inputs @ values("w", (300, 400)).T
    assert passed.std() == pytest.approx(1.0, abs=0.05)
    factors = values("norm", (1000,))
    assert factors.abs().mean() == pytest.approx(1.0, abs=0.15)
    assert 0.4 < float((factors > 0).float().mean()) < 0.6
    assert 0.5 < float(values("layer_scalar", (1,))) < 1.5


def test_claims_hand_out_any_tensor_once_and_optional_ones_are_not_there() -> None:
    weights = DummyWeights("a", dtype=torch.bfloat16, device=META)
    claims = TensorClaims(weights, source=Path("a"))
    assert "embed_tokens.weight" not in claims
    weight = claims.take("layers.0.weight", (3, 4))
    assert isinstance(weight, DenseWeight)
    assert weight.values.is_meta
    assert (weight.shape, weight.values.dtype) == ((3, 4), torch.bfloat16)
    assert weights.claimed == {"layers.0.weight": (3, 4)}
    with pytest.raises(WeightsError, match="claimed twice"):
        claims.take("layers.0.weight", (3, 4))
    assert claims.finish() == []
    assert len(weights) == 0
