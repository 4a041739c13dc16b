"""What a GGUF file of a Gemma 3 text model says, in Hugging Face terms: tensor names and a `gemma3_text` config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.gguf_blocks import unpack_tensor
from outrider.weights.gguf_file import GgufFile, read_gguf
from outrider.weights.packed import PackedWeight

SUPPORTED_ARCHITECTURES = ("gemma3",)
NORM_OFFSET = 0.0  # the converter stored 1 + w, so a norm weight multiplies directly

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_REQUIRED = object()
_GEMMA3_27B_LAYERS = 62


def open_gemma_gguf(path: Path) -> GgufFile:
    """Read and check a GGUF header; raises UnsupportedModelError for an architecture that we do not run."""
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} holds architecture {architecture!r}; supported in GGUF: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(f"{path} is one piece of a split GGUF; merge the pieces into one file first.")
    return file


def gguf_tensors(file: GgufFile) -> dict[str, PackedWeight]:
    """All tensors under their Hugging Face names, int8 blocks wherever the stored format is one."""
    tensors = {}
    for tensor in file.tensors.values():
        name = _hugging_face_name(tensor.name)
        if name is None:
            raise WeightsError(f"{file.path}: tensor {tensor.name} is not one that a gemma3 model has.")
        try:
            tensors[name] = unpack_tensor(tensor, name=name)
        except (UnsupportedModelError, WeightsError) as error:
            raise type(error)(f"{file.path}: {error}") from error
    return tensors


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The metadata as a Hugging Face style `gemma3_text` config."""
    num_layers, num_heads = _number(file, "block_count"), _number(file, "attention.head_count")
    hidden_size, head_dim = _number(file, "embedding_length"), _number(file, "attention.key_length")
    if (value_length := _number(file, "attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModelError(
            f"{file.path} has keys of {head_dim} and values of {value_length}; they must agree."
        )
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": _number(file, "feed_forward_length"),
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": _number(file, "context_length"),
        "rms_norm_eps": _clean(_number(file, "attention.layer_norm_rms_epsilon")),
        "sliding_window": _number(file, "attention.sliding_window"),
        "layer_types": _layer_types(file, num_layers=num_layers),
        "rope_theta": _clean(_number(file, "rope.freq_base")),
        "rope_local_base_freq": _clean(_number(file, "rope.freq_base_swa", 10_000.0)),
        "rope_scaling": _rope_scaling(file),
        # The 27B scales queries by hidden/heads instead of head_dim; GGUF has no key for it, so readers go by depth.
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": _number(file, "attn_logit_softcapping", None),
        "final_logit_softcapping": _number(file, "final_logit_softcapping", None),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id", 2),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id", 1),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id", 0),
    }


def _hugging_face_name(name: str) -> str | None:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _number(file: GgufFile, key: str, default: Any = _REQUIRED) -> Any:
    value = file.metadata.get(f"gemma3.{key}", default)
    if value is _REQUIRED:
        raise WeightsError(f"{file.path} lacks the metadata gemma3.{key}; convert the model again.")
    if value is not default and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise WeightsError(f"{file.path} has gemma3.{key}={value!r}, which is not one number.")
    return value


def _clean(value: float) -> float:
    """The shortest decimal that is this float32: 1e-06 rather than 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{file.path} lacks the tensor token_embd.weight.")
    num_tokens = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if num_tokens > embedding.shape[0]:
        raise WeightsError(f"{file.path} lists {num_tokens} tokens, but token_embd.weight has shape {embedding.shape}.")
    return embedding.shape[0]


def _layer_types(file: GgufFile, *, num_layers: int) -> list[str]:
    period = _number(file, "attention.sliding_window_pattern", 6)
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(num_layers)]


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    kind = file.metadata.get("gemma3.rope.scaling.type", "none")
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": _number(file, "rope.scaling.factor")}
