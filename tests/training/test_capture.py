"""Dense grids: a step at a time, whole texts at once and the serving path give the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import Rows, allocate_caches
from outrider.models.gemma import GemmaTarget
from outrider.training.capture import GridKernels, GridRunner, Taps
from tests.training import tiny

TAPS = (0, 2)


def served(target: GemmaTarget, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [S, P, V] and taps [S, P, taps * N] of texts int64 [S, P] as packed rows."""
    num_sequences, num_positions = token_ids.shape
    caches = allocate_caches(
        target.config.layers,
        num_seats=num_sequences,
        context_length=num_positions,
        max_rows=num_positions,
        dtype=target.dtype,
        device=target.device,
    )
    seats = torch.arange(num_sequences).repeat_interleave(num_positions)
    rows = Rows(token_ids.reshape(-1), seats, torch.arange(num_positions).repeat(num_sequences))
    output = target.forward(rows, caches, tap_layers=TAPS)
    assert output.taps is not None
    shape = (num_sequences, num_positions, -1)
    return target.logits(output.hidden).view(shape), output.taps.view(shape)


@pytest.mark.parametrize("kind", [GridKernels, TorchKernels])
@pytest.mark.parametrize("norm_offset", [0.0, 1.0])
def test_steps_and_whole_texts_agree_with_serving(kind: type[TorchKernels], norm_offset: float) -> None:
    token_ids = tiny.text(3, num_positions=12).token_ids.long()
    kernels = TorchKernels(torch.float32)
    logits, taps = served(tiny.target(kernels=kernels, norm_offset=norm_offset), token_ids)
    target = tiny.target(kernels=kind(torch.float32), norm_offset=norm_offset)
    runner = GridRunner(target, num_sequences=3, num_positions=12)
    for position in range(12):
        stepped, tapped = runner.step(token_ids[:, position], position, TAPS)
        torch.testing.assert_close(stepped, logits[:, position], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(tapped, taps[:, position], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(runner.taps(token_ids, TAPS), taps, atol=1e-4, rtol=1e-4)
    assert runner.step(token_ids[:, 0], 0)[1] is None


def test_fewer_and_shorter_texts_than_the_runner_holds() -> None:
    token_ids = tiny.text(4, num_positions=12).token_ids.long()
    runner = GridRunner(tiny.target(), num_sequences=4, num_positions=12)
    whole = runner.taps(token_ids, TAPS)
    torch.testing.assert_close(runner.taps(token_ids[:2, :7], TAPS), whole[:2, :7], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_fused_kernels_are_those_of_the_reference(activation: str) -> None:
    grid, reference = GridKernels(torch.float32), TorchKernels(torch.float32)
    inputs, gate, up = torch.randn(5, 32), *torch.randn(2, 48, 32).unbind()
    torch.testing.assert_close(
        grid.gated_linear(inputs, gate, up, activation=activation),
        reference.gated_linear(inputs, gate, up, activation=activation),
    )
    weight = torch.rand(32)
    torch.testing.assert_close(grid.rms_norm(inputs, weight, eps=1e-6), reference.rms_norm(inputs, weight, eps=1e-6))


def test_norms_of_half_precision_are_taken_in_float32() -> None:
    inputs = (300.0 * torch.randn(4, 32)).to(torch.bfloat16)
    normed = GridKernels(torch.bfloat16).rms_norm(inputs, torch.ones(32), eps=1e-6)
    assert normed.dtype == torch.bfloat16
    precise = GridKernels(torch.float32).rms_norm(inputs.float(), torch.ones(32), eps=1e-6)
    torch.testing.assert_close(normed, precise.to(torch.bfloat16))


def test_texts_beyond_the_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_tokens=41 exceeds"):
        GridRunner(tiny.target(), num_sequences=1, num_positions=41)


def test_taps_are_given_by_layer_in_the_order_asked() -> None:
    values = torch.arange(3.0).repeat_interleave(tiny.HIDDEN).expand(1, 2, -1)
    taps = Taps(values, (0, 1, 2))
    assert taps.of((2, 0))[0, 0].tolist() == [2.0] * tiny.HIDDEN + [0.0] * tiny.HIDDEN
    assert taps.of((0, 1, 2)) is values
