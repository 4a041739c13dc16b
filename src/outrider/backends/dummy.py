"""Targets and drafters of public dimensions with made-up weights: decode speed does not depend on what weights say."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from outrider.backends.dummy_configs import dummy_drafter_config, dummy_target_config
from outrider.kernels.ops import Kernels
from outrider.models.dflash import DFlashDrafter
from outrider.models.drafter_config import check_drafter
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import drafter_config, load_target
from outrider.weights.dummy import DummyWeights
from outrider.weights.load_quantization import check_quantization
from outrider.weights.loader import Checkpoint
from outrider.weights.packed import DenseWeight


class Models(NamedTuple):
    """A target and, where one was asked for, its drafter."""

    target: GemmaTarget
    drafter: DFlashDrafter | None


def build_dummy(
    name: str,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    with_drafter: bool = True,
    drafter_quantization: str | None = None,
) -> Models:
    """One of DUMMY_NAMES, built as loading builds it: noise on `device`, or on the meta device no numbers at all.

    ConfigError for a name or a quantisation that is not known.
    """
    check_quantization(drafter_quantization)
    source = Path(name)
    checkpoint = Checkpoint(
        dummy_target_config(name),
        DummyWeights(name, dtype=dtype, device=device),
        norm_offset=0.0,
        tokenizer_path=source,
        source=source,
        source_sha256=None,
    )
    target = load_target(checkpoint, kernels=kernels, dtype=dtype, device=device, context_length=context_length)
    stored = target.stored_embedding
    # Files keep what is stored off the device; only the kernels' own form of the table may take memory there.
    target.stored_embedding = DenseWeight(stored.name, torch.empty(stored.shape, dtype=dtype, device="meta"))
    if not with_drafter:
        return Models(target, None)
    path = Path(f"{name}-dflash")
    declared = drafter_config(dummy_drafter_config(name), source=path)
    check_drafter(declared, target.config, target_name=name)
    drafter = DFlashDrafter(
        declared,
        DummyWeights(path.name, dtype=dtype, device=device),
        target,
        kernels=kernels,
        context_length=context_length,
        source=path,
        quantization=drafter_quantization,
    )
    return Models(target, drafter)
