"""A Gemma 3 GGUF file of a few hundred kilobytes with one tensor of every block type, made from a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GgmlType

HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM, LAYERS = 256, 256, 2, 64, 2
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["\n", "\n\n", "  ", "▁", "a", "b", "ab", "▁a", "▁ab", "c", "abc"]
TOKENS = SPECIAL + BYTES + PIECES
TOKEN_TYPES = [3] * len(SPECIAL) + [6] * len(BYTES) + [4] * 3 + [1] * (len(PIECES) - 3)
NORMS = {"attn_norm": HIDDEN, "post_attention_norm": HIDDEN, "ffn_norm": HIDDEN, "post_ffw_norm": HIDDEN}
HEAD_NORMS = {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}
MATRICES = {
    "attn_q": ((HEADS * HEAD_DIM, HIDDEN), GgmlType.Q5_0),
    "attn_k": ((HEAD_DIM, HIDDEN), GgmlType.Q4_0),
    "attn_v": ((HEAD_DIM, HIDDEN), GgmlType.Q8_0),
    "attn_output": ((HIDDEN, HEADS * HEAD_DIM), GgmlType.F16),
    "ffn_gate": ((INTERMEDIATE, HIDDEN), GgmlType.Q4_K),
    "ffn_up": ((INTERMEDIATE, HIDDEN), GgmlType.Q6_K),
    "ffn_down": ((HIDDEN, INTERMEDIATE), GgmlType.Q5_1),
}


def random_blocks(kind: GgmlType, shape: tuple[int, int], *, seed: int) -> np.ndarray:
    """Stored bytes, uint8 [out, bytes a row], of random blocks whose float16 scales are finite."""
    rng = np.random.default_rng(seed)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block_size, block_bytes), dtype=np.uint8)
    halves = rng.normal(0, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    places = {GgmlType.Q4_K: (0, 4), GgmlType.Q5_1: (0, 4), GgmlType.Q6_K: (block_bytes - 2, block_bytes)}
    start, stop = places.get(kind, (0, 2))
    blocks[:, start:stop] = halves[:, : stop - start]
    return blocks.reshape(shape[0], -1)


def write_tiny_gguf(path: Path, *, architecture: str = "gemma3", extra_tensor: str | None = None) -> Path:
    """Write the file and return its path."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(8)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(TOKEN_TYPES)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    _add_tensors(writer)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.zeros(2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: GGUFWriter) -> None:
    rng = np.random.default_rng(0)
    embedding = rng.normal(0, 0.02, (len(TOKENS), HIDDEN)).astype(np.float32)
    writer.add_tensor("token_embd.weight", quants.quantize(embedding, GgmlType.Q8_0), raw_dtype=GgmlType.Q8_0)
    writer.add_tensor("output_norm.weight", rng.normal(1, 0.1, HIDDEN).astype(np.float32))
    for layer in range(LAYERS):
        for name, size in {**NORMS, **HEAD_NORMS}.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.normal(1, 0.1, size).astype(np.float32))
        for seed, (name, (shape, kind)) in enumerate(MATRICES.items()):
            full_name = f"blk.{layer}.{name}.weight"
            if kind is GgmlType.F16:
                writer.add_tensor(full_name, rng.normal(0, 0.02, shape).astype(np.float16))
            else:
                writer.add_tensor(full_name, random_blocks(kind, shape, seed=seed), raw_dtype=kind)
