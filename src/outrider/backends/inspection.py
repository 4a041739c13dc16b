"""What `doctor` looks at: kernels, target, drafter, and a few drafted tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider import metrics
from outrider.backends.local import drafter_path, load, resolve_device
from outrider.core import SamplingParams
from outrider.engine.engine import EngineConfig
from outrider.kernels.ops import select_kernels
from outrider.models.registry import drafter_config, target_config
from outrider.weights.loader import load_checkpoint, load_safetensors_dir
from outrider.weights.locate import locate_target

PROBE_PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
PROBE_TOKENS = 32


def inspect_kernels(kind: str, device: str) -> dict[str, Any]:
    """Which kernel set this machine gets."""
    place = resolve_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    chosen = select_kernels(kind, dtype=dtype, device=place)
    return {"kernels": chosen.name, "device": str(place), "row_invariant": chosen.row_invariant}


def inspect_target(target: str | None, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """What the target declares."""
    checkpoint = load_checkpoint(locate_target(target), progress=progress)
    config = target_config(checkpoint)
    kinds = [layer.kind.value.removesuffix("_attention") for layer in config.layers]
    return {
        "source": checkpoint.source.name,
        "sha256": checkpoint.source_sha256,
        "model_type": config.model_type,
        "layers": f"{len(kinds)} ({kinds.count('sliding')} sliding, {kinds.count('full')} full)",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
    }


def inspect_drafter(drafter: str, *, target: str | None) -> dict[str, Any]:
    """What the drafter declares, causality of each layer included."""
    path = drafter_path(drafter, target=target)
    if path is None:
        return {"drafter": None}
    config, tensors = load_safetensors_dir(Path(path))
    declared = drafter_config(config, source=path)
    return {
        "drafter": declared.name,
        "tensors": len(tensors),
        "block_size": declared.block_size,
        "num_speculative_tokens": declared.num_speculative_tokens,
        "target_layer_ids": list(declared.target_layer_ids),
        "draft_vocab_size": declared.draft_vocab_size,
        "causal_layers": list(declared.layer_is_causal),
    }


def probe_drafting(target: str | None, *, drafter: str, kernels: str, device: str) -> dict[str, Any]:
    """Load both and draft: the acceptance of a text that any drafter can guess."""
    llm = load(
        target, drafter=drafter, kernels=kernels, device=device, config=EngineConfig(max_seats=1, context_length=256)
    )
    params = SamplingParams(max_tokens=PROBE_TOKENS)
    result = llm.generate([PROBE_PROMPT], params)[0]
    is_same = llm.without_drafter().generate([PROBE_PROMPT], params)[0].token_ids == result.token_ids
    return {
        "drafter": llm.drafter_name,
        "mean_acceptance_length": metrics.mean_acceptance_length(result.acceptance),
        "same_text_as_plain": is_same,
    }
