"""Bytes a cycle must read. Seen red: windows ignored, the head left out of the draft, taps counted to the draft."""

from __future__ import annotations

import pytest
import torch

from outrider.backends import floor
from outrider.backends.dummy import Models, build_dummy
from outrider.backends.floor import cycle_bytes, floor_figures, read_bandwidth, seconds_of
from outrider.kernels.reference import TorchKernels

CPU, META = torch.device("cpu"), torch.device("meta")


def outlined(name: str) -> Models:
    kernels = TorchKernels(torch.bfloat16, META)
    return build_dummy(name, kernels=kernels, dtype=torch.bfloat16, device=META, context_length=2048)


def test_the_tiny_pair_by_hand() -> None:
    models = outlined("tiny")
    found = cycle_bytes(models.target, models.drafter, context_tokens=100, batch=3)
    assert found is not None
    mlp, size = 3 * 256 * 512, 256
    sliding = 2 * size * 4 * 128 + 2 * size * 2 * 128 + mlp  # q and o, k and v
    full = 2 * size * 4 * 256 + size * 256 + mlp  # q and o, one matrix for keys and values
    taps = size * 2 * size
    assert found.verify == {
        "products": 2 * (5 * sliding + full + taps),
        "head": 2 * 1024 * size,
        "attention": 3 * 2 * (5 * 2 * 2 * 128 * 32 + 2 * 1 * 256 * 100),
    }
    assert found.draft == {
        "products": 2 * 2 * sliding,
        "head": 2 * 1024 * size,
        "attention": 3 * 2 * (2 * 2 * 128 * 48 + 2 * 2 * 128 * 100),
    }
    assert found.total == sum(found.draft.values()) + sum(found.verify.values())


def test_the_31b_reads_what_was_counted_for_the_peer() -> None:
    """61.4 GB plain, 67.3 GB with a drafter at about 1 K context, keys and values left out."""
    models = outlined("31b")
    plain = cycle_bytes(models.target, None, context_tokens=0, batch=1)
    drafted = cycle_bytes(models.target, models.drafter, context_tokens=0, batch=1)
    assert plain is not None
    assert drafted is not None
    assert plain.draft == {}
    assert plain.total == pytest.approx(61.4e9, rel=1e-3)
    assert drafted.total == pytest.approx(67.3e9, rel=2e-3)


def test_experts_have_no_floor_before_rows_choose_them() -> None:
    assert cycle_bytes(outlined("26b-a4b").target, None, context_tokens=10, batch=1) is None


def test_figures_of_a_known_case() -> None:
    figures = floor_figures(20.0, 64_000_000_000, 4e12)
    assert figures == {"floor_ms": 16.0, "tb_per_s": 3.2, "floor_share": 0.8}
    nothing = {"floor_ms": None, "tb_per_s": None, "floor_share": None}
    assert floor_figures(20.0, None, 4e12) == floor_figures(20.0, 0, 4e12) == nothing


def test_bandwidth_is_that_of_the_fastest_read(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.5, 0.25, 0.4] + [1.0] * 7)
    monkeypatch.setattr(floor, "seconds_of", lambda work, device: work() is not None and next(times))
    assert read_bandwidth(CPU, num_bytes=4000) == 16_000


def test_seconds_on_a_cpu_are_the_hosts() -> None:
    assert 0 < seconds_of(lambda: sum(range(1000)), CPU) < 1.0


@pytest.mark.gpu
def test_reads_on_a_gpu_are_faster_than_any_hosts() -> None:
    assert 0.3e12 < read_bandwidth(torch.device("cuda")) < 20e12
