"""Single kernels timed. Seen red: a missing matrix of a product, a set that is wrong called right, bytes not halved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.backends import kernel_timing
from outrider.backends.dummy import build_dummy
from outrider.backends.kernel_timing import (
    num_kernel_steps,
    products_of,
    relative_error,
    seconds_per_call,
    time_kernels,
)
from outrider.errors import ConfigError
from outrider.kernels.reference import TorchKernels

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_timing, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(kernel_timing, "MAX_COPIES", 2)
    monkeypatch.setattr(kernel_timing, "NUM_REPLAYS", 1)


def timed(target: str = "tiny", **options: Any) -> tuple[dict[str, Any], list[str]]:
    messages: list[str] = []
    defaults: dict[str, Any] = {"rows": (1, 4), "contexts": (40,), "device": "cpu"}
    return time_kernels(target, progress=messages.append, **defaults | options), messages


@pytest.mark.usefixtures("quick")
def test_all_products_and_attention_on_all_sets() -> None:
    found, messages = timed()
    rows = found["rows"]
    assert len(messages) == num_kernel_steps(kernel_timing.KINDS)
    names = {row["name"] for row in rows}
    assert names == {
        "qkv sliding",
        "output sliding",
        "qkv full",
        "output full",
        "gate and up",
        "down",
        "head, best",
        "attention sliding",
        "attention full",
    }
    assert all(row["error"] < 1e-4 and row["us"] > 0 for row in rows)
    assert {row["rows"] for row in rows if row["name"] == "down"} == {1, 4}
    assert all(row["same_as_alone"] for row in rows if row["kernels"] == "cpu")
    down = next(row for row in rows if row["name"] == "down")
    assert down["floor_ms"] == pytest.approx(4 * 256 * 512 / 1e6)
    windowed = next(row for row in rows if row["name"] == "attention sliding")
    assert windowed["floor_ms"] == pytest.approx(4 * 2 * 32 * 2 * 128 / 1e6)


def test_products_are_those_that_a_31b_multiplies_with() -> None:
    kernels = TorchKernels(torch.bfloat16, META)
    model = build_dummy("31b", kernels=kernels, dtype=torch.bfloat16, device=META, context_length=2).target
    by_name = {product.name: product for product in products_of(model.config)}
    assert by_name["qkv sliding"].shapes == ((8192, 5376), (4096, 5376), (4096, 5376))
    assert by_name["qkv full"].shapes == ((16384, 5376), (2048, 5376))  # values are keys there
    assert by_name["output full"].shapes == ((5376, 16384),)
    assert by_name["gate and up"].num_weights == 2 * 21504 * 5376


@pytest.mark.usefixtures("quick")
def test_a_set_that_is_wrong_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(TorchKernels):
        name = "wrong"

        def linear(self, inputs: Tensor, weight: Tensor, *, residual: Tensor | None = None) -> Tensor:
            return super().linear(inputs, weight, residual=residual) * (1.0 + 0.1 * len(inputs))

    monkeypatch.setattr(kernel_timing, "select_kernels", lambda *_, **__: Wrong(torch.float32, CPU))
    found, _ = timed(kinds=("products",))
    wrong = [row for row in found["rows"] if row["kernels"] == "wrong" and row["name"] == "down"]
    assert [row["error"] for row in wrong] == pytest.approx([0.1, 0.4], abs=1e-3)
    assert [row["same_as_alone"] for row in wrong] == [True, False]
    assert {row["kernels"] for row in found["rows"]} == {"wrong", "torch"}


def test_errors_are_relative_to_the_largest_number() -> None:
    assert relative_error(torch.tensor([1.0, -4.5]), torch.tensor([1.0, -4.0])) == pytest.approx(0.125)
    assert math.isnan(relative_error(torch.tensor([float("nan")]), torch.tensor([1.0])))


def test_seconds_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(kernel_timing, "seconds_of", lambda work, device: work() or 6.0)
    steps: Sequence[Any] = [lambda: calls.append(1)] * 3
    assert seconds_per_call(steps, CPU) == 2.0
    assert len(calls) == 3 * kernel_timing.NUM_REPLAYS


def test_kinds_and_targets_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="'norms'"):
        timed(kinds=("norms",))
    with pytest.raises(ConfigError, match="'70b'"):
        timed("70b")


@pytest.mark.gpu
def test_tiny_kernels_on_a_gpu_are_right_and_timed_in_graphs() -> None:
    found, _ = timed(rows=(1, 16), contexts=(64,), device="cuda")
    assert all(row["error"] < 0.02 and row["us"] > 0 for row in found["rows"])
    ours = [row for row in found["rows"] if row["kernels"] != "torch"]
    assert all(row["same_as_alone"] for row in ours)
