"""A GGUF file in Hugging Face terms: names, config, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights import gguf
from outrider.weights.gguf import gguf_config, gguf_tensors, open_gemma_gguf
from outrider.weights.gguf_file import GgufFile
from outrider.weights.loader import Checkpoint
from tests.weights.tiny_gguf import LAYERS, write_tiny_gguf


@pytest.fixture(scope="module")
def tiny_header(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """One small sound file for all that only look at its metadata."""
    return open_gemma_gguf(write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


def with_metadata(file: GgufFile, **changes: Any) -> GgufFile:
    """The file with metadata replaced; keys use __ for dots, None removes one."""
    metadata = {**file.metadata, **{key.replace("__", "."): value for key, value in changes.items()}}
    return replace(file, metadata={key: value for key, value in metadata.items() if value is not None})


def test_embedded_config(embedded_checkpoint: Checkpoint, embedded_gguf: GgufFile) -> None:
    config = gguf_config(embedded_gguf)
    assert embedded_checkpoint.config == config
    full_layers = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full_layers == [5, 11, 17]
    assert {key: value for key, value in config.items() if key != "layer_types"} == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 2048,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": None,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def hugging_face_names(num_layers: int) -> set[str]:
    parts = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    parts += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    layers = {f"model.layers.{layer}.{part}.weight" for layer in range(num_layers) for part in parts}
    return layers | {"model.embed_tokens.weight", "model.norm.weight"}


def test_names_are_those_of_hugging_face(embedded_checkpoint: Checkpoint, tiny_gguf: Path) -> None:
    weights = gguf_tensors(open_gemma_gguf(tiny_gguf))
    assert set(weights) == hugging_face_names(LAYERS)
    assert all(name == weight.name for name, weight in weights.items())
    assert set(embedded_checkpoint.tensors) == hugging_face_names(18)


@pytest.mark.parametrize(
    ("stored_name", "name"),
    [
        ("blk.1.attn_norm", "model.layers.1.input_layernorm"),
        ("blk.1.post_attention_norm", "model.layers.1.post_attention_layernorm"),
        ("blk.1.ffn_norm", "model.layers.1.pre_feedforward_layernorm"),
        ("blk.1.post_ffw_norm", "model.layers.1.post_feedforward_layernorm"),
        ("blk.1.attn_q_norm", "model.layers.1.self_attn.q_norm"),
        ("blk.1.attn_k_norm", "model.layers.1.self_attn.k_norm"),
        ("output_norm", "model.norm"),
    ],
)
def test_norms_go_to_their_places(tiny_gguf: Path, stored_name: str, name: str) -> None:
    file = open_gemma_gguf(tiny_gguf)
    stored = file.tensors[f"{stored_name}.weight"].raw.tobytes()
    assert gguf_tensors(file)[f"{name}.weight"].dequantize(torch.float32).numpy().tobytes() == stored


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "llama.gguf", architecture="llama")
    with pytest.raises(
        UnsupportedModelError, match=r"llama\.gguf holds architecture 'llama'; supported in GGUF: gemma3"
    ):
        open_gemma_gguf(path)


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "extra.gguf", extra_tensor="blk.0.ffn_gate_inp.weight")
    with pytest.raises(WeightsError, match=r"extra\.gguf: tensor blk\.0\.ffn_gate_inp\.weight is not one"):
        gguf_tensors(open_gemma_gguf(path))


def test_missing_metadata_is_named(tiny_gguf: Path) -> None:
    file = with_metadata(open_gemma_gguf(tiny_gguf), gemma3__attention__sliding_window=None)
    with pytest.raises(WeightsError, match=r"tiny\.gguf lacks gemma3\.attention\.sliding_window; expected a whole"):
        gguf_config(file)


NAN, INF = float("nan"), float("inf")
NO_SIZE = [0, -1, 2.5, NAN, INF, 2**63, "4", "", [1, 2], True]
NO_NUMBER = [0, -1, NAN, INF, "x", [1], True]
BAD: dict[str, list[Any]] = {
    **{
        f"gemma3.{name}": NO_SIZE
        for name in (
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "attention.sliding_window",
            "attention.sliding_window_pattern",
        )
    },
    "gemma3.attention.layer_norm_rms_epsilon": NO_NUMBER,
    "gemma3.rope.freq_base": NO_NUMBER,
    "gemma3.rope.freq_base_swa": NO_NUMBER,
    "gemma3.attn_logit_softcapping": NO_NUMBER,
    "gemma3.final_logit_softcapping": NO_NUMBER,
    "gemma3.rope.scaling.type": [1, [], True],
    "tokenizer.ggml.tokens": ["x", 1, [1], True],
    "tokenizer.ggml.bos_token_id": [-1, 272, 2.5, "x", [1], True],
    "tokenizer.ggml.eos_token_id": [-1, 272, 2.5, "x", [1], True],
    "tokenizer.ggml.padding_token_id": [-1, 2.5, "x", [1], True],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_metadata_of_the_wrong_kind_or_range_is_named(tiny_header: GgufFile, key: str, value: Any) -> None:
    """Seen red: reading metadata as it stands, numbers of any size included."""
    file = replace(tiny_header, metadata={**tiny_header.metadata, key: value})
    with pytest.raises(WeightsError, match=rf"tiny\.gguf has {key}=.*; expected "):
        gguf_config(file)


@pytest.mark.parametrize("factor", [None, *NO_NUMBER])
def test_a_scaling_without_its_factor_is_refused(tiny_header: GgufFile, factor: Any) -> None:
    changes = {"gemma3__rope__scaling__type": "linear", "gemma3__rope__scaling__factor": factor}
    with pytest.raises(WeightsError, match=r"gemma3\.rope\.scaling\.factor"):
        gguf_config(with_metadata(tiny_header, **changes))


@pytest.mark.parametrize("count", ["2", 2.5, [2], True, -1])
def test_a_split_count_that_is_none_is_named(tiny_gguf: Path, count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = with_metadata(open_gemma_gguf(tiny_gguf), split__count=count)
    monkeypatch.setattr(gguf, "read_gguf", lambda path: file)
    with pytest.raises(WeightsError, match=r"tiny\.gguf has split\.count=.*; expected a whole number"):
        open_gemma_gguf(tiny_gguf)


def test_query_scale_of_the_27b(tiny_gguf: Path) -> None:
    changes = {"gemma3__block_count": 62, "gemma3__embedding_length": 5376, "gemma3__attention__head_count": 32}
    assert gguf_config(with_metadata(open_gemma_gguf(tiny_gguf), **changes))["query_pre_attn_scalar"] == 168


def test_rope_scaling_and_soft_cap_are_kept(tiny_gguf: Path) -> None:
    changes = {"gemma3__rope__scaling__type": "linear", "gemma3__rope__scaling__factor": 8.0}
    config = gguf_config(with_metadata(open_gemma_gguf(tiny_gguf), **changes, gemma3__final_logit_softcapping=30.0))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["final_logit_softcapping"] == 30.0


def test_more_tokens_than_embedding_rows(tiny_gguf: Path) -> None:
    file = with_metadata(open_gemma_gguf(tiny_gguf), tokenizer__ggml__tokens=["x"] * 999)
    with pytest.raises(WeightsError, match=r"lists 999 tokens, but token_embd\.weight has shape"):
        gguf_config(file)
