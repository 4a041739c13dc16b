"""T-074: a table that a drafter borrows is left out and named, or written with the target's real numbers; never random.

One loader uses whatever is in the file (its target has another embedding), one always takes the target's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.gemma import GemmaTarget
from outrider.models.registry import load_drafter, load_target
from outrider.training.convert import ConvertOptions, convert_drafter, read_source
from outrider.weights.loader import load_checkpoint
from tests.models import test_registry_goldens as goldens
from tests.models.test_registry_goldens import CONTEXT_LENGTH, GOLDEN

CASE, BORROWED, OWN = "deepspec-qwen3", "embed_tokens.weight", "lm_head.weight"  # its head is no copy


@pytest.fixture
def right(tmp_path: Path) -> Path:
    """The target that the drafter's embedding was copied from."""
    directory = tmp_path / "right"
    shutil.copytree(GOLDEN / "zlab-dflash" / "target", directory)
    stored = load_file(directory / "model.safetensors")
    (name,) = (name for name in stored if name.endswith("embed_tokens.weight"))
    table = load_file(GOLDEN / CASE / "drafter" / "model.safetensors")["embed_tokens.weight"]
    save_file({**stored, name: table}, directory / "model.safetensors")
    return directory


def loaded(target: Path) -> GemmaTarget:
    return load_target(
        load_checkpoint(target),
        kernels=goldens.KERNELS,
        dtype=torch.float64,
        device=torch.device("cpu"),
        context_length=CONTEXT_LENGTH,
    )


def error(drafter: Path, target: Path) -> float:
    """How far the drafts' logits are from those that DeepSpec's own code computed."""
    found = load_drafter(drafter, loaded(target), target_name="target", context_length=CONTEXT_LENGTH)
    return goldens.base_error(found, CASE)


def test_both_kinds_of_loader_draft_what_was_trained(right: Path, tmp_path: Path) -> None:
    wrong = GOLDEN / "zlab-dflash" / "target"
    small, whole = tmp_path / "small", tmp_path / "whole"
    left_out = convert_drafter(GOLDEN / CASE / "drafter", small, ConvertOptions(layout="outrider", target=right))
    assert left_out.borrowed == (BORROWED,)
    assert read_source(small).config["borrowed_tensors"] == [BORROWED]
    assert BORROWED not in read_source(small).weights
    assert OWN in read_source(small).weights
    written = convert_drafter(small, whole, ConvertOptions(layout="deepspec", target=right))
    assert written.borrowed == ()
    assert error(small, right) < goldens.TOLERANCE
    assert error(whole, right) < goldens.TOLERANCE
    assert error(whole, wrong) < goldens.TOLERANCE  # it uses what is in the file
    assert error(small, wrong) > goldens.MIN_MUTANT_ERROR  # so the two targets do differ
