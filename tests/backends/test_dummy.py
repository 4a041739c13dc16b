"""Made-up models are those of the name plans. Seen red: another width of a feed-forward layer, a tap moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.backends.account import held_bytes
from outrider.backends.dummy import Models, build_dummy
from outrider.kernels.reference import TorchKernels
from outrider.models.registry import drafter_config, load_drafter, load_target
from outrider.weights.loader import load_checkpoint
from outrider.weights.safetensors_dir import read_config
from tests.plans import plan_path

META = torch.device("meta")
KERNELS = TorchKernels(torch.bfloat16, META)
TARGETS = {"31b": "gemma-4-31B-it", "26b-a4b": "gemma-4-26B-A4B-it"}


def outlined(name: str) -> Models:
    return build_dummy(name, kernels=KERNELS, dtype=torch.bfloat16, device=META, context_length=2048)


@pytest.mark.parametrize("name", list(TARGETS))
def test_a_target_has_the_public_dimensions(name: str) -> None:
    checkpoint = load_checkpoint(plan_path(TARGETS[name]), without_numbers=True)
    public = load_target(checkpoint, kernels=KERNELS, dtype=torch.bfloat16, device=META, context_length=2048)
    made_up = outlined(name).target
    of_text = {field: getattr(made_up.config, field) for field in ("model_type", "tensor_prefix", "skipped_tensors")}
    assert made_up.config == replace(
        public.config, placeholders=(), eos_token_ids=made_up.config.eos_token_ids, **of_text
    )
    assert held_bytes(made_up) == held_bytes(public)


def test_a_drafter_has_the_public_dimensions() -> None:
    models, path = outlined("31b"), plan_path("gemma-4-31B-it-DFlash")
    public = load_drafter(path, models.target, target_name="31b", context_length=2048)
    assert models.drafter is not None
    assert models.drafter.config == replace(drafter_config(read_config(path), source=path), name="31b-dflash")
    assert held_bytes(models.target, models.drafter) == held_bytes(models.target, public)


def test_a_tiny_pair_runs_and_keeps_no_second_table() -> None:
    cpu = torch.device("cpu")
    kernels = TorchKernels(torch.float32, cpu)
    models = build_dummy("tiny", kernels=kernels, dtype=torch.float32, device=cpu, context_length=64)
    assert models.target.stored_embedding.values.is_meta  # type: ignore[union-attr]
    assert models.target.embedding.std() > 0
    assert models.drafter is not None
    assert models.drafter.head is models.target.embedding
    plain = build_dummy("tiny", kernels=kernels, dtype=torch.float32, device=cpu, context_length=64, with_drafter=False)
    assert plain.drafter is None
    assert torch.equal(plain.target.embedding, models.target.embedding)
