"""Which models we run, by the `model_type` or architecture their config declares. One line each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.errors import DrafterMismatchError, UnsupportedModelError
from outrider.kernels.ops import Kernels
from outrider.models.config import TargetConfig, gemma3_config
from outrider.models.dflash import DFlashDrafter
from outrider.models.drafter_config import (
    DrafterConfig,
    check_drafter,
    deepspec_gemma4_config,
    deepspec_qwen3_config,
    dflash_config,
    speculators_config,
)
from outrider.models.gemma import GemmaTarget
from outrider.models.gemma4_config import gemma4_config, gemma4_multimodal_config, gemma4_unified_config
from outrider.weights.fields import Fields
from outrider.weights.load_quantization import check_quantization
from outrider.weights.loader import Checkpoint, load_safetensors_dir

TARGETS: dict[str, Callable[..., TargetConfig]] = {
    "gemma3_text": gemma3_config,
    "gemma4_text": gemma4_config,
    "gemma4_unified_text": gemma4_unified_config,
    "gemma4": gemma4_multimodal_config,
    "gemma4_unified": gemma4_multimodal_config,
}
DRAFTERS: dict[str, Callable[..., DrafterConfig]] = {
    "DFlashDraftModel": dflash_config,
    "Gemma4DSparkModel": deepspec_gemma4_config,
    "Qwen3DSparkModel": deepspec_qwen3_config,
}


def target_config(checkpoint: Checkpoint) -> TargetConfig:
    """Read a checkpoint's config, or raise UnsupportedModelError naming what it is and what we run."""
    config_path = checkpoint.source / "config.json"  # of a directory; other formats declare in the weight file
    fields = Fields(checkpoint.config, source=config_path if config_path.is_file() else checkpoint.source)
    model_type = fields.text("model_type", default=None)
    if model_type not in TARGETS:
        raise UnsupportedModelError(f"{checkpoint.source}: model_type {model_type!r} is not one of {sorted(TARGETS)}.")
    return TARGETS[model_type](fields, norm_offset=checkpoint.norm_offset)


def load_target(
    checkpoint: Checkpoint, *, kernels: Kernels, dtype: torch.dtype, device: torch.device, context_length: int
) -> GemmaTarget:
    """Build a target from its checkpoint; every tensor is claimed or refused by name."""
    return GemmaTarget(
        target_config(checkpoint),
        checkpoint,
        kernels=kernels,
        dtype=dtype,
        device=device,
        context_length=context_length,
    )


def drafter_config(config: dict[str, Any], *, source: Path) -> DrafterConfig:
    """Read a drafter's config, or raise naming its architecture. Those of the speculators library say so themselves."""
    fields = Fields(config, source=source / "config.json", error=DrafterMismatchError)
    if "speculators_model_type" in fields:
        return speculators_config(fields, name=source.name)
    architectures = fields.texts("architectures", default=None) or []
    known = [name for name in architectures if name in DRAFTERS]
    if not known:
        raise UnsupportedModelError(
            f"{source}: architectures {architectures} hold none of {sorted(DRAFTERS)}. Give a drafter; a target goes "
            "in --target."
        )
    return DRAFTERS[known[0]](fields, name=source.name)


def load_drafter(
    path: Path, target: GemmaTarget, *, target_name: str, context_length: int, quantization: str | None = None
) -> DFlashDrafter:
    """Load a drafter directory (config.json and safetensors) for a target, after checking that they belong together.

    With a `quantization` ("int8" or "int4"; ConfigError for others) its projections and head are rounded.
    """
    check_quantization(quantization)
    config, tensors = load_safetensors_dir(path, without_numbers=target.device.type == "meta")
    declared = drafter_config(config, source=path)
    check_drafter(declared, target.config, target_name=target_name)
    expected = (declared.hidden_size, len(declared.target_layer_ids) * declared.hidden_size)
    fc = tensors.get("fc.weight")
    if fc is not None and tuple(fc.shape) != expected:
        raise DrafterMismatchError(
            f"drafter {declared.name} does not fit target {target_name}: fc.weight has shape {tuple(fc.shape)}, but "
            f"{len(declared.target_layer_ids)} target_layer_ids of {declared.hidden_size} need {expected}."
        )
    return DFlashDrafter(
        declared,
        tensors,
        target,
        kernels=target.kernels,
        context_length=context_length,
        source=path,
        quantization=quantization,
    )
