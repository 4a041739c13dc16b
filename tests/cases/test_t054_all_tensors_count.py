"""T-054: every tensor that a drafter expects must be there, every one that is there must be used, and matters.

Seen red: TensorClaims.finish without its refusal; the forward pass leaving out the final norm.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import WeightsError
from outrider.models.dflash import DFlashDrafter
from outrider.models.draft_layers import BlockRows
from outrider.models.registry import load_drafter
from outrider.weights.packed import DenseWeight
from tests.cases.common import fresh_caches, text_taps
from tests.cases.test_t048_drafter_fits import write_drafter
from tests.toy import (
    MASK_TOKEN_ID,
    SOURCE,
    TAP_LAYERS,
    block_logits,
    toy_drafter_config,
    toy_drafter_tensors,
    toy_target,
)

TENSORS = sorted(toy_drafter_tensors(toy_drafter_config()))
TARGET = toy_target()
TEXT = [5, 17, 80, 3, 44, 9]


def refused(path: Path, tensors: dict[str, Tensor], message: str) -> None:
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        load_drafter(path, TARGET, target_name="toy", context_length=64)


@pytest.mark.parametrize("name", TENSORS)
def test_t054_a_missing_tensor_is_refused(name: str, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", {})
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    refused(path, tensors, f"tensor {name} is missing")


@pytest.mark.parametrize(
    "name", ["layers.2.mlp.up_proj.weight", "markov_head.markov_w1.weight", "layers.0.self_attn.q_proj.bias"]
)
def test_t054_an_extra_tensor_is_refused(name: str, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", {})
    refused(path, {**load_file(path / "model.safetensors"), name: torch.zeros(4)}, f"does not use: {name}")


def test_t054_a_prefix_is_not_guessed(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", {})
    tensors = {f"model.{name}": each for name, each in load_file(path / "model.safetensors").items()}
    refused(path, tensors, r"It has model\.")


def draft_logits(changed: str | None = None, value: float | None = None) -> Tensor:
    """One commit and one propose with one tensor changed: set to a value, or halved with the signs alternating."""
    config = toy_drafter_config()
    tensors = toy_drafter_tensors(config)
    if changed is not None:
        values = tensors[changed].dequantize(torch.float64)
        signs = 1.0 - 2.0 * (torch.arange(values.shape[-1]) % 2)
        tensors[changed] = DenseWeight(changed, torch.full_like(values, value) if value else 0.5 * values * signs)
    drafter = DFlashDrafter(config, tensors, TARGET, kernels=TARGET.kernels, context_length=64, source=SOURCE)
    caches = fresh_caches(config.layers)
    positions = torch.arange(len(TEXT))
    drafter.write_context(text_taps(TARGET, TEXT, TAP_LAYERS), positions * 0, positions, caches)
    block = BlockRows(torch.tensor([12, *[MASK_TOKEN_ID] * 4]), torch.tensor([0]), torch.tensor([len(TEXT)]), 5)
    assert drafter.head is TARGET.embedding  # the head is shared, none is loaded
    return block_logits(drafter, block, caches)


@pytest.mark.parametrize("name", TENSORS)
def test_t054_every_tensor_is_read_by_a_draft(name: str) -> None:
    assert (draft_logits(name) - draft_logits()).abs().amax(dim=(0, 2)).min() > 1e-6


@pytest.mark.parametrize("name", ["hidden_norm.weight", "norm.weight"])
def test_t054_norms_are_applied(name: str) -> None:
    assert (draft_logits(name, 3.0) - draft_logits(name, 1.0)).abs().max() > 1e-3
