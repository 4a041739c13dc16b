"""Where the memory of a target and its drafter would go on a GPU, from their configs and headers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.backends.account import drafter_bytes_by_kind, held_bytes, target_bytes_by_kind
from outrider.backends.dummy import Models, build_dummy
from outrider.backends.dummy_configs import DUMMY_NAMES
from outrider.backends.inspection import outlined_target
from outrider.backends.local import check_drafter_quantization, drafter_path, resolve_config
from outrider.backends.memory_plan import USABLE, plan_caches, share_memory
from outrider.engine.engine import EngineConfig
from outrider.kernels.low_bit import low_bit_matrix
from outrider.kernels.reference import TorchKernels
from outrider.models.registry import load_drafter
from outrider.weights.packed import PackedWeight

_META = torch.device("meta")
_DTYPE = torch.bfloat16  # of weights and caches on a GPU


def explain_memory(
    target: str | None,
    *,
    drafter: str | None,
    drafter_quantization: str | None = None,
    config: EngineConfig,
    gpu_memory_bytes: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Bytes by part, as loading would allocate them on CUDA, and whether they fit.

    `target` is what `load` takes, or one of DUMMY_NAMES, whose drafter is "auto". Weights are not read. ConfigError for
    a quantisation that is not known, or of no drafter.
    """
    models = outlined_models(
        target,
        drafter=drafter,
        drafter_quantization=drafter_quantization,
        context_length=config.context_length,
        progress=progress,
    )
    max_positions, are_exact = models.target.config.max_positions, models.target.config.experts is None
    config = resolve_config(config, device=torch.device("cuda"), max_positions=max_positions, row_invariant=are_exact)
    target_bytes = held_bytes(models.target)
    both_bytes = held_bytes(*(model for model in models if model is not None))
    drafter_layers = models.drafter.config.layers if models.drafter else ()
    caches = plan_caches(models.target.config.layers, drafter_layers, config, dtype=_DTYPE)
    usable = int((gpu_memory_bytes - both_bytes) * USABLE)  # as loading sees it: a share of what weights leave free
    plan = share_memory(models.target, models.drafter, config, available_bytes=usable, on_gpu=True)
    return {
        "target": target or "embedded",
        "drafter": models.drafter.config.name if models.drafter else None,
        "context_length": config.context_length,
        "max_seats": config.max_seats,
        "parts": {
            "target": target_bytes_by_kind(models.target),
            "drafter": drafter_bytes_by_kind(models.drafter) if models.drafter else {},
            "caches": {_group_name(group.owner, group.window): group.num_bytes for group in caches.groups},
        },
        "target_bytes": target_bytes,
        "drafter_bytes": both_bytes - target_bytes,
        "cache_bytes": caches.num_bytes,
        "allocated_bytes": both_bytes + caches.num_bytes,
        "logits_bytes": plan.parts["logits of a cycle"],
        "pass_bytes": plan.parts["a pass"],
        "graphs_bytes": plan.parts["graphs"],
        "reserve_bytes": max(0, gpu_memory_bytes - both_bytes) - max(0, usable),
        "left_over_bytes": plan.most_cache_bytes - plan.cache_bytes,
        "gpu_memory_bytes": gpu_memory_bytes,
        "fits": plan.most_cache_bytes >= plan.cache_bytes,
    }


def outlined_models(
    target: str | None,
    *,
    drafter: str | None,
    drafter_quantization: str | None = None,
    context_length: int,
    progress: Callable[[str], None],
) -> Models:
    """Target and drafter on the meta device, by path, hub name or made-up size."""
    kernels = _OutlinedKernels(_DTYPE, _META)
    if target in DUMMY_NAMES and target is not None and drafter in ("auto", None):
        check_drafter_quantization(drafter_quantization, has_drafter=drafter is not None)
        return build_dummy(
            target,
            kernels=kernels,
            dtype=_DTYPE,
            device=_META,
            context_length=context_length,
            with_drafter=drafter is not None,
            drafter_quantization=drafter_quantization,
        )
    path = drafter_path(drafter, target=target)
    check_drafter_quantization(drafter_quantization, has_drafter=path is not None)
    checkpoint, model = outlined_target(target, context_length=context_length, progress=progress, kernels=kernels)
    if path is None:
        return Models(model, None)
    name = checkpoint.source.name
    loaded = load_drafter(
        path, model, target_name=name, context_length=context_length, quantization=drafter_quantization
    )
    return Models(model, loaded)


class _OutlinedKernels(TorchKernels):
    """Weights in the forms that the GPU set keeps; on the meta device nothing is computed with them."""

    reads_low_bit = True

    def pack(self, weight: PackedWeight) -> Any:
        """As `GpuKernels.pack`."""
        low_bit = low_bit_matrix(weight, self.device)
        return super().pack(weight) if low_bit is None else low_bit


def _group_name(owner: str, window: int | None) -> str:
    return f"{owner}, {'full attention' if window is None else f'window {window}'}"
