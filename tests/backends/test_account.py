"""Tensors and bytes of models that nobody ran."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.backends.account import (
    account_caches,
    account_weights,
    drafter_bytes_by_kind,
    held_bytes,
    target_bytes_by_kind,
)
from outrider.engine.engine import EngineConfig
from outrider.kernels.reference import TorchKernels
from outrider.weights.packed import DenseWeight, quantize_int8
from outrider.weights.safetensors_dir import load_safetensors_dir
from tests.toy import toy_drafter, toy_target, toy_target_config
from tests.weights.low_bit_writer import CONFIGS, stored

NAME = "model.layers.0.mlp.up_proj.weight"


def test_stored_tensors_are_counted_by_what_becomes_of_them(tmp_path: Path) -> None:
    tensors = stored("modelopt", NAME, torch.randn(12, 64)) | {
        "model.layers.0.mlp.up_proj.input_scale": torch.tensor(1.0),
        "model.norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "model.vision_tower.a": torch.ones(3),
        "model.vision_tower.b": torch.ones(3),
        "model.layers.7.self_attn.k_norm.weight": torch.ones(3),
        "model.layers.8.self_attn.k_norm.weight": torch.ones(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIGS["modelopt"]}))
    _, weights = load_safetensors_dir(tmp_path, without_numbers=True)
    skipped = [name for name in weights if name not in (NAME, "model.norm.weight")]
    assert account_weights(weights, skipped, patterns=("model.vision_tower.*",)) == {
        "tensors_loaded": 4,
        "tensors_skipped": {
            "*.input_scale": 1,
            "model.layers.*.self_attn.k_norm.weight": 2,
            "model.vision_tower.*": 2,
        },
        "packed_weights": {"NVFP4": 1},
        "stored_bytes": 12 * 32 + 12 * 4 + 4 + 4 * 2,
    }


def test_weights_of_a_prepared_file() -> None:
    weights = {"a": quantize_int8("a", torch.ones(4, 32), group_size=32), "n": DenseWeight("n", torch.ones(8))}
    assert account_weights(weights) == {
        "tensors_loaded": 2,
        "tensors_skipped": {},
        "packed_weights": {"int8 blocks": 1},
        "stored_bytes": 4 * 32 + 4 * 4 + 8 * 4,
    }


def test_a_tensor_that_target_and_drafter_share_counts_once() -> None:
    target = toy_target(kernels=TorchKernels(torch.float64), context_length=64)
    drafter = toy_drafter(target)
    assert drafter.head is target.embedding
    own = [drafter.fc, drafter.hidden_norm, drafter.final_norm]
    for rope in drafter.ropes.values():
        own += [rope.cos, rope.sin]
    for layer in drafter.layers:
        attention = layer.attention
        own += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        own += [attention.q_norm, attention.k_norm, layer.input_norm, layer.post_attention_norm]
        own += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    expected = sum(tensor.nbytes for tensor in own if tensor is not None)
    assert held_bytes(target, drafter) - held_bytes(target) == expected


def test_caches_grow_where_a_layer_sees_everything() -> None:
    """Four windows of 8 with heads of (2, 8); two full layers with heads of (1, 24)."""
    layers, context = toy_target_config().layers, 1000
    rows = EngineConfig().max_rows
    assert account_caches(layers, context_length=context, dtype=torch.bfloat16) == {
        "cache_bytes_per_token": 2 * 2 * 24 * 2,
        "cache_window_bytes": 4 * 2 * 16 * 2 * (8 + rows),
        "cache_bytes": 2 * 2 * 24 * 2 * context + 4 * 2 * 16 * 2 * (8 + rows),
    }


def test_a_layer_that_reads_another_has_no_cache_of_its_own() -> None:
    *layers, last = toy_target_config().layers
    reading = [*layers, replace(last, cache_source=3)]
    assert account_caches(reading, context_length=64, dtype=torch.bfloat16)["cache_bytes_per_token"] == 2 * 24 * 2


def test_bytes_by_kind_come_to_what_is_held() -> None:
    target = toy_target()
    drafter = toy_drafter(target)
    of_target, of_drafter = target_bytes_by_kind(target), drafter_bytes_by_kind(drafter)
    assert sum(of_target.values()) == held_bytes(target)
    assert sum(of_drafter.values()) == held_bytes(target, drafter) - held_bytes(target)
    assert of_target["embedding and head"] == 96 * 32 * 8
    assert of_target["dense feed-forward"] == 6 * 3 * 32 * 64 * 8
    assert of_drafter["projection of taps"] == 32 * 3 * 32 * 8
    assert "own embedding and head" not in of_drafter
