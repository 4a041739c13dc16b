"""Writing a trained drafter where anyone can load it: z-lab's names and config, int8 groups of 32, and its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.training.config import DrafterShape
from outrider.training.files import write_folder
from outrider.training.trainer import Trainer
from outrider.weights.packed import quantize_int8

GROUP_SIZE = 32
_DENSE = ("confidence_head.", "markov_head.gate_proj", "markov_head.joint_proj")


def exported_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Matrices as int8 with float16 scales (compressed-tensors `int-quantized`), norms as float32, d2t as int32.

    Embedding and head are the target's own and are not written. The small matrices of heads stay as they are.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in trainer.model.state_dict().items():
        if value.dim() == 2 and not name.startswith(_DENSE) and value.shape[1] % GROUP_SIZE == 0:
            packed = quantize_int8(name, value.cpu(), group_size=GROUP_SIZE)
            tensors[name] = packed.values
            tensors[name.removesuffix(".weight") + ".weight_scale"] = packed.scales.to(torch.float16)
        else:
            tensors[name] = value.float().cpu().contiguous()
    if trainer.recipe.drafter.draft_vocab_size < trainer.target.config.vocab_size:
        ids = trainer.draft_to_target.cpu()
        tensors["d2t"] = (ids - torch.arange(len(ids))).to(torch.int32)
    return tensors


def exported_config(trainer: Trainer) -> dict[str, Any]:
    """A z-lab style config, or DeepSpec's for Gemma 4 layers; every option that changes the forward pass is in it."""
    shape, target, spec = trainer.recipe.drafter, trainer.target.config, trainer.config
    return {
        **(_gemma4_fields(shape) if shape.is_gemma4 else _pre_norm_fields(shape)),
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "layer_types": [layer.kind.value for layer in spec.layers],
        "final_logit_softcapping": spec.final_logit_softcapping,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "block_size": shape.block_size,
        "num_target_layers": len(target.layers),
        "num_speculative_tokens": trainer.recipe.num_speculative_tokens,
        "is_causal": shape.is_causal,
        "sample_from_anchor": shape.sample_from_anchor,
        "markov_rank": shape.markov_rank,
        "markov_head_type": shape.markov_head_type,
        "enable_confidence_head": shape.enable_confidence_head,
        "confidence_head_with_markov": shape.confidence_head_with_markov,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": GROUP_SIZE,
                    },
                }
            },
        },
    }


def _pre_norm_fields(shape: DrafterShape) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "sliding_window": shape.sliding_window or None,
        "use_sliding_window": shape.sliding_window > 0,
        "rope_theta": shape.rope_theta,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "scale_block_embeddings": shape.scale_block_embeddings,
        },
    }


def _gemma4_fields(shape: DrafterShape) -> dict[str, Any]:
    rope = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    turning = {"rope_type": "proportional", "partial_rotary_factor": shape.rope_rotated}
    return {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": max(1, shape.sliding_window),  # which no layer reads, for all are full
        "global_head_dim": shape.head_dim,
        "num_global_key_value_heads": shape.num_kv_heads,
        "attention_k_eq_v": True,
        "rope_parameters": {"full_attention": {**rope, **turning}, "sliding_attention": rope},
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
    }


def export_drafter(trainer: Trainer, directory: Path, *, record: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and training_record.json, all of them or none."""

    def fill(folder: Path) -> None:
        save_file(exported_tensors(trainer), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(exported_config(trainer), indent=2) + "\n")
        (folder / "training_record.json").write_text(json.dumps(record, indent=1) + "\n")

    write_folder(directory, fill, what="drafter")
