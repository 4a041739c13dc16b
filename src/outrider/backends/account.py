"""What models come to, counted without running them: tensors loaded and skipped, bytes of weights and caches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from outrider.engine.engine import EngineConfig
from outrider.models.attention import allocate_caches
from outrider.models.config import LayerSpec
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget
from outrider.models.layers import AttentionWeights
from outrider.weights.packed import BlockInt8Weight, PackedWeight
from outrider.weights.safetensors_dir import StoredWeights


def account_weights(
    weights: Mapping[str, PackedWeight], skipped: Sequence[str] = (), *, patterns: Sequence[str] = ()
) -> dict[str, Any]:
    """Stored tensors that load, those that do not, packed weights, and bytes as stored.

    `skipped` are weights that the model leaves alone; those that match one of `patterns` are counted together.
    """
    loaded = sorted(set(weights) - set(skipped))
    if not isinstance(weights, StoredWeights):  # a prepared GGUF file
        return _account_prepared([weights[name] for name in loaded])
    plans, headers = weights.plans, weights.headers
    left = Counter[str]()
    for name in skipped:
        left[_group(name, patterns)] += len(plans[name].tensors)
    used = {stored for plan in plans.values() for stored in plan.tensors.values()}
    left.update(f"*{name[name.rindex('.') :]}" for name in headers if name not in used)  # scales of activations, caches
    stored = [tensor for name in loaded for tensor in plans[name].tensors.values()]
    layouts = [str(scheme.layout) for name in loaded if (scheme := plans[name].scheme)]
    return {
        "tensors_loaded": len(stored),
        "tensors_skipped": dict(sorted(left.items())),
        "packed_weights": dict(Counter(layouts)),
        "stored_bytes": sum(headers[name].num_bytes for name in stored),
    }


def _account_prepared(loaded: Sequence[PackedWeight]) -> dict[str, Any]:
    blocks = [weight for weight in loaded if isinstance(weight, BlockInt8Weight)]
    plain = [weight.values for weight in loaded if not isinstance(weight, BlockInt8Weight)]
    parts = [part for weight in blocks for part in (weight.values, weight.scales, weight.offsets) if part is not None]
    return {
        "tensors_loaded": len(loaded),
        "tensors_skipped": {},
        "packed_weights": {"int8 blocks": len(blocks)},
        "stored_bytes": sum(tensor.nbytes for tensor in (*plain, *parts)),
    }


def _group(name: str, patterns: Sequence[str]) -> str:
    """The pattern that a name matches; else the name, its layer left open."""
    matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
    return matching[0] if matching else re.sub(r"\.\d+\.", ".*.", name)


def held_bytes(*models: object) -> int:
    """Bytes of all tensors that models hold, rotary tables included; one that several hold counts once.

    Weights as they are stored stay in their files, and do not count.
    """
    seen: set[int] = set()
    return sum(_held_bytes(value, seen) for model in models for value in vars(model).values())


def target_bytes_by_kind(model: GemmaTarget) -> dict[str, int]:
    """`held_bytes` of a target by what holds them; the rest are norms and rotary tables."""
    return _by_kind(
        model,
        {
            "embedding and head": model.embedding,
            "attention": [_matrices(layer.attention) for layer in model.layers],
            "dense feed-forward": [layer.mlp for layer in model.layers],
            "experts": [[layer.experts.weights, layer.experts.router_proj] for layer in model.layers if layer.experts],
            "per-layer table": model.per_layer_embedding.table if model.per_layer_embedding else None,
            "per-layer projections": [
                model.per_layer_embedding.projection if model.per_layer_embedding else None,
                *([layer.per_layer.gate, layer.per_layer.projection] for layer in model.layers if layer.per_layer),
            ],
        },
        seen=set(),
    )


def drafter_bytes_by_kind(drafter: DFlashDrafter) -> dict[str, int]:
    """What a drafter holds beside its target, by what holds it."""
    seen: set[int] = set()
    for value in vars(drafter.target).values():
        _held_bytes(value, seen)
    return _by_kind(
        drafter,
        {
            "projection of taps": drafter.fc,
            "attention": [_matrices(layer.attention) for layer in drafter.layers],
            "dense feed-forward": [layer.mlp for layer in drafter.layers],
            "own embedding and head": [drafter.embedding, drafter.head],
            "Markov and confidence heads": [drafter.markov, drafter.confidence],
        },
        seen=seen,
    )


def _matrices(attention: AttentionWeights) -> list[Any]:
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]


def _by_kind(model: object, kinds: Mapping[str, object], *, seen: set[int]) -> dict[str, int]:
    counted = {kind: _held_bytes(held, seen) for kind, held in kinds.items()}
    rest = sum(_held_bytes(value, seen) for value in vars(model).values())
    return {kind: num_bytes for kind, num_bytes in counted.items() if num_bytes} | {"norms and tables": rest}


def _held_bytes(value: object, seen: set[int]) -> int:
    if id(value) in seen or isinstance(value, PackedWeight):
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.nbytes
    parts: Sequence[object] = ()
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    return sum(_held_bytes(part, seen) for part in parts)


def account_caches(layers: Sequence[LayerSpec], *, context_length: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of one request's keys and values.

    Layers that see everything keep every token; a window keeps its last positions and room for the rows of one pass.
    """
    max_rows = EngineConfig(context_length=context_length).max_rows
    caches = allocate_caches(
        layers, num_seats=1, context_length=context_length, max_rows=max_rows, dtype=dtype, device="meta"
    )
    growing, windowed = 0, 0
    for spec, cache in zip(layers, caches, strict=True):
        num_bytes = cache.keys.nbytes + cache.values.nbytes if spec.cache_source is None else 0
        growing += num_bytes if spec.window is None else 0
        windowed += num_bytes if spec.window is not None else 0
    return {
        "cache_bytes_per_token": growing // context_length,
        "cache_window_bytes": windowed,
        "cache_bytes": growing + windowed,
    }
