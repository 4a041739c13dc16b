"""Public dimensions of targets and their drafters, as config.json has them: for timing without checkpoints. No torch.

Sizes are those of the published configs (formats.md §1.1, §2.1); `tests/golden/name_plans` has the same by name and
shape. `tiny` is nobody's: it is small enough for a CPU and has every kind of layer of the 31B.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

_SLIDING, _FULL = "sliding_attention", "full_attention"
_TARGET: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 262144,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "block_size": 16,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 2048,
    "final_logit_softcapping": 30.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_TARGETS: dict[str, dict[str, Any]] = {
    "31b": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "26b-a4b": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "tiny": {
        "vocab_size": 1024,
        "vocab_size_per_layer_input": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 128,
        "global_head_dim": 256,
        "sliding_window": 32,
        "max_position_embeddings": 4096,
    },
}
_DRAFTERS: dict[str, dict[str, Any]] = {
    "31b": {
        "hidden_size": 5376,
        "intermediate_size": 10752,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "target_layer_ids": (1, 12, 23, 35, 46, 57),
    },
    "26b-a4b": {
        "hidden_size": 2816,
        "intermediate_size": 5632,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "target_layer_ids": (1, 6, 11, 17, 22, 27),
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "block_size": 8,
        "sliding_window": 48,
        "max_position_embeddings": 4096,
        "target_layer_ids": (1, 3),
    },
}
DUMMY_NAMES = tuple(_TARGETS)


def dummy_target_config(name: str) -> dict[str, Any]:
    """config.json of a target; every sixth layer and the last see everything. ConfigError for a name not known."""
    sizes = {**_TARGET, **_named(name, _TARGETS)}
    num_layers = sizes["num_hidden_layers"]
    kinds = [_FULL if (index + 1) % 6 == 0 else _SLIDING for index in range(num_layers)]
    return {**sizes, "layer_types": kinds}


def dummy_drafter_config(name: str) -> dict[str, Any]:
    """config.json of the target's DFlash drafter: sliding layers, then a full one. ConfigError for a name not known."""
    sizes = {**_DRAFTER, **_named(name, _DRAFTERS)}
    taps: Sequence[int] = sizes.pop("target_layer_ids")
    num_layers = sizes["num_hidden_layers"]
    return {
        **sizes,
        "max_window_layers": num_layers,
        "layer_types": [_SLIDING] * (num_layers - 1) + [_FULL],
        "num_target_layers": _TARGETS[name]["num_hidden_layers"],
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": list(taps)},
    }


def write_dummy_configs(name: str, folder: Path) -> tuple[Path, Path]:
    """Directories of target and drafter with a config.json each, for engines that make dummy weights themselves."""
    paths = folder / name, folder / f"{name}-dflash"
    for path, config in zip(paths, (dummy_target_config(name), dummy_drafter_config(name)), strict=True):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1))
    return paths


def _named(name: str, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if name not in known:
        raise ConfigError(f"{name!r} is not a size that can be made up; choose one of {', '.join(DUMMY_NAMES)}.")
    return known[name]
