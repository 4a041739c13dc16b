"""What a GGUF file of a Gemma 3 text model says, in Hugging Face terms: tensor names and a `gemma3_text` config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.fields import Fields
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
_MAX_LAYERS = 1024  # more than any model has
_GEMMA3_27B_LAYERS = 62


def open_gemma_gguf(path: Path) -> GgufFile:
    """Read and check a GGUF header; raises UnsupportedModelError for an architecture that we do not run."""
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} holds architecture {architecture!r}; supported in GGUF: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    if metadata_fields(file).integer("split.count", low=0, default=1) > 1:
        raise UnsupportedModelError(f"{path} is one piece of a split GGUF; merge the pieces into one file first.")
    return file


def metadata_fields(file: GgufFile) -> Fields:
    """The metadata, to be read by type and range."""
    return Fields(file.metadata, source=file.path)


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
    fields = metadata_fields(file)
    num_layers = fields.integer("gemma3.block_count", low=1, high=_MAX_LAYERS)
    num_heads = fields.integer("gemma3.attention.head_count", low=1)
    hidden_size = fields.integer("gemma3.embedding_length", low=1)
    head_dim = fields.integer("gemma3.attention.key_length", low=1)
    value_length = fields.integer("gemma3.attention.value_length", low=1, default=head_dim)
    if value_length != head_dim:
        raise UnsupportedModelError(
            f"{file.path} has keys of {head_dim} and values of {value_length}; they must agree."
        )
    vocab_size = _vocab_size(file)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("gemma3.attention.head_count_kv", low=1),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("gemma3.feed_forward_length", low=1),
        "vocab_size": vocab_size,
        "max_position_embeddings": fields.integer("gemma3.context_length", low=1),
        "rms_norm_eps": _clean(fields.number("gemma3.attention.layer_norm_rms_epsilon", high=1.0)),
        "sliding_window": fields.integer("gemma3.attention.sliding_window", low=1),
        "layer_types": _layer_types(fields, num_layers=num_layers),
        "rope_theta": _clean(fields.number("gemma3.rope.freq_base")),
        "rope_local_base_freq": _clean(fields.number("gemma3.rope.freq_base_swa", default=10_000.0)),
        "rope_scaling": _rope_scaling(fields),
        # The 27B scales queries by hidden/heads instead of head_dim; GGUF has no key for it, so readers go by depth.
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": fields.number("gemma3.attn_logit_softcapping", default=None),
        "final_logit_softcapping": fields.number("gemma3.final_logit_softcapping", default=None),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": fields.integer("tokenizer.ggml.bos_token_id", low=0, high=vocab_size - 1, default=2),
        "eos_token_id": fields.integer("tokenizer.ggml.eos_token_id", low=0, high=vocab_size - 1, default=1),
        "pad_token_id": fields.integer("tokenizer.ggml.padding_token_id", low=0, default=0),
    }


def _hugging_face_name(name: str) -> str | None:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _clean(value: float) -> float:
    """The shortest decimal that is this float32: 1e-06 rather than 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{file.path} lacks the tensor token_embd.weight.")
    num_tokens = len(metadata_fields(file).texts("tokenizer.ggml.tokens", default=[]))
    if num_tokens > embedding.shape[0]:
        raise WeightsError(f"{file.path} lists {num_tokens} tokens, but token_embd.weight has shape {embedding.shape}.")
    return embedding.shape[0]


def _layer_types(fields: Fields, *, num_layers: int) -> list[str]:
    period = fields.integer("gemma3.attention.sliding_window_pattern", low=1, default=6)
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(num_layers)]


def _rope_scaling(fields: Fields) -> dict[str, Any] | None:
    kind = fields.text("gemma3.rope.scaling.type", default="none")
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": fields.number("gemma3.rope.scaling.factor")}
