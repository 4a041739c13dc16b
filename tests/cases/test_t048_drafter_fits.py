"""T-048: a drafter of another target is refused at start-up, naming drafter, target and field.

Seen red: check_drafter returning at once (all of them start).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import DrafterMismatchError
from outrider.models.registry import load_drafter
from tests.models.test_drafter_config import DRAFTER
from tests.toy import toy_drafter_config, toy_drafter_tensors, toy_target

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layer absent": ({"target_layer_ids": [1, 3, 9]}, "target_layer_ids"),
    "layer one past the last": ({"target_layer_ids": [1, 3, 6]}, "target_layer_ids"),
    "layer twice": ({"target_layer_ids": [1, 3, 3]}, "target_layer_ids"),
    "negative layer": ({"target_layer_ids": [-1, 2, 4]}, "target_layer_ids"),
    "no layers": ({"target_layer_ids": []}, "target_layer_ids"),
    "layers missing": ({"target_layer_ids": None}, "target_layer_ids"),
    "projection of two": ({"target_layer_ids": [1, 3]}, r"fc\.weight"),
    "hidden 64": ({"hidden_size": 64}, "hidden_size"),
    "vocabulary 95": ({"vocab_size": 95}, "vocab_size"),
    "five layers": ({"num_target_layers": 5}, "num_target_layers"),
    "mask outside": ({"mask_token_id": 96}, "mask_token_id"),
}


def write_drafter(path: Path, changes: dict[str, Any]) -> Path:
    """F2 as a directory; changed keys go wherever the config has them."""
    path.mkdir()
    config = {**DRAFTER, "architectures": ["DFlashDraftModel"], "rope_theta": 1e4}
    nested = dict(config["dflash_config"])
    for key, value in changes.items():
        (nested if key in nested else config)[key] = value
    (path / "config.json").write_text(json.dumps({**config, "dflash_config": nested}), encoding="utf-8")
    tensors = toy_drafter_tensors(toy_drafter_config())
    save_file({name: each.dequantize(torch.float32) for name, each in tensors.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", BAD)
def test_t048_another_targets_drafter_is_refused(name: str, tmp_path: Path) -> None:
    changes, field = BAD[name]
    path = write_drafter(tmp_path / "draft-model", changes)
    with pytest.raises(DrafterMismatchError, match=field) as caught:
        load_drafter(path, toy_target(), target_name="toy-target", context_length=64)
    assert "draft-model" in str(caught.value)
    assert name == "layers missing" or "toy-target" in str(caught.value)  # what is absent clashes with no target


def test_t048_the_right_one_starts(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "draft-model", {})
    drafter = load_drafter(path, toy_target(), target_name="toy-target", context_length=64)
    assert drafter.config.target_layer_ids == (1, 3, 4)
