"""Models by what their configs declare, and drafter directories."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import DrafterMismatchError, UnsupportedModelError, WeightsError
from outrider.models.registry import drafter_config, load_drafter, target_config
from tests.models.test_config import GEMMA3
from tests.models.test_drafter_config import DRAFTER
from tests.toy import toy_checkpoint, toy_drafter_config, toy_drafter_tensors, toy_target, toy_target_config


def write_drafter(path: Path, *, config: dict[str, Any] | None = None, **tensors: Tensor) -> Path:
    """A directory with the toy drafter's weights."""
    path.mkdir()
    declared = {**DRAFTER, "architectures": ["DFlashDraftModel"], "rope_theta": 1e4, **(config or {})}
    (path / "config.json").write_text(json.dumps(declared), encoding="utf-8")
    stored = {
        name: weight.dequantize(torch.float32) for name, weight in toy_drafter_tensors(toy_drafter_config()).items()
    }
    save_file(stored | tensors, path / "model.safetensors")
    return path


def test_target_is_chosen_by_model_type() -> None:
    checkpoint = replace(toy_checkpoint(toy_target_config()), config={**GEMMA3, "model_type": "gemma3_text"})
    config = target_config(checkpoint)
    assert (config.model_type, config.norm_offset) == ("gemma3_text", 1.0)


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}])
def test_an_unknown_target_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="gemma3_text"):
        target_config(replace(toy_checkpoint(toy_target_config()), config=config))


@pytest.mark.parametrize("is_directory", [True, False])
def test_a_refusal_names_the_file_that_declares_it(is_directory: bool, tmp_path: Path) -> None:
    if is_directory:
        (tmp_path / "config.json").touch()
    config = {**GEMMA3, "model_type": "gemma3_text", "head_dim": 0}
    checkpoint = replace(toy_checkpoint(toy_target_config()), config=config, source=tmp_path)
    with pytest.raises(WeightsError, match=f"^{tmp_path / 'config.json' if is_directory else tmp_path} has head_dim=0"):
        target_config(checkpoint)


@pytest.mark.parametrize("architectures", [None, [], ["EagleModel"]])
def test_an_unknown_drafter_is_refused(architectures: list[str] | None, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="DFlashDraftModel"):
        drafter_config({**DRAFTER, "architectures": architectures}, source=tmp_path)


def test_a_drafter_directory_loads(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter")
    drafter = load_drafter(path, toy_target(), target_name="toy", context_length=32)
    assert drafter.config == replace(toy_drafter_config(), name="drafter")
    expected = toy_drafter_tensors(toy_drafter_config())["fc.weight"].dequantize(torch.float32)
    assert torch.equal(drafter.fc, expected.to(torch.float64))


def test_a_projection_of_too_few_features_is_refused(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", **{"fc.weight": torch.zeros(32, 64)})
    with pytest.raises(DrafterMismatchError, match=r"drafter .*toy.*fc\.weight.*\(32, 64\).*3 target_layer_ids"):
        load_drafter(path, toy_target(), target_name="toy", context_length=32)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", config={"vocab_size": 95})
    with pytest.raises(DrafterMismatchError, match="vocab_size"):
        load_drafter(path, toy_target(), target_name="toy", context_length=32)
