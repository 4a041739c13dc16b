"""What the configs of drafters say, in each of their dialects, and what they may not say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import DrafterMismatchError, UnsupportedModelError, WeightsError
from outrider.models.config import LayerKind, RopeSpec
from outrider.models.drafter_config import (
    BlockLayout,
    ConfidenceSpec,
    DrafterConfig,
    LayerStyle,
    MarkovKind,
    MarkovSpec,
    check_drafter,
)
from outrider.models.registry import drafter_config
from tests.toy import toy_target_config

DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "block_size": 5,
    "num_target_layers": 6,
    "dflash_config": {"target_layer_ids": [1, 3, 4], "mask_token_id": 95},
}


# As DeepSpec saves it: a Gemma 4 text config of the target with its own fields added.
DEEPSPEC: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "vocab_size": 96,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
    "num_target_layers": 6,
    "block_size": 7,
    "mask_token_id": 4,
    "target_layer_ids": [1, 3, 4],
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "block_size": 8,
    "mask_token_id": 4,
    "aux_hidden_state_layer_ids": [2, 4, 5],
    "draft_vocab_size": 48,
    "markov_rank": 8,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
}


def drafter(dflash: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """DRAFTER with changes at top level and in dflash_config; None removes a field."""
    nested = {**DRAFTER["dflash_config"], **(dflash or {})}
    merged = {**DRAFTER, **changes, "dflash_config": {k: v for k, v in nested.items() if v is not None}}
    return {key: value for key, value in merged.items() if value is not None}


def read_drafter(config: dict[str, Any], *, name: str = "d") -> DrafterConfig:
    return drafter_config({"architectures": ["DFlashDraftModel"], **config}, source=Path(name))


def test_fields_of_a_drafter() -> None:
    config = read_drafter(DRAFTER)
    assert config.target_layer_ids == (1, 3, 4)
    assert config.mask_token_id == 95
    assert config.max_draft_length == config.num_speculative_tokens == 4
    assert config.draft_vocab_size == 96
    assert config.layout is BlockLayout.SAME_POSITION
    assert config.embedding_scale is None
    assert (config.markov, config.confidence) == (None, None)
    assert [spec.window for spec in config.layers] == [None, None]
    assert config.layers[0].rope == RopeSpec(theta=1e6)


def test_nested_fields_win_over_top_level_ones() -> None:
    config = read_drafter(drafter(mask_token_id=7, target_layer_ids=[0]))
    assert (config.mask_token_id, config.target_layer_ids) == (95, (1, 3, 4))
    flat = drafter({"mask_token_id": None, "target_layer_ids": None}, mask_token_id=7, target_layer_ids=[0])
    assert (read_drafter(flat).mask_token_id, read_drafter(flat).target_layer_ids) == (7, (0,))


@pytest.mark.parametrize(
    ("fields", "causal"),
    [
        ({}, (True, False)),
        ({"is_causal": True}, (True, True)),
        ({"is_causal": False}, (False, False)),
        ({"dflash": {"causal": True}}, (True, True)),
        ({"dflash": {"causal": False}}, (False, False)),
        ({"is_causal": False, "dflash": {"causal": True}}, (False, False)),
    ],
)
def test_causality_is_declared_or_follows_the_layer_kind(fields: dict[str, Any], causal: tuple[bool, bool]) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = read_drafter(drafter(**fields, layer_types=kinds, sliding_window=16))
    assert config.layer_is_causal == causal
    assert [spec.window for spec in config.layers] == [16, None]


def test_one_switch_makes_all_layers_sliding() -> None:
    config = read_drafter(drafter({"swa_window_size": 12}, use_sliding_window=True, sliding_window=16))
    assert [spec.window for spec in config.layers] == [12, 12]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dflash": {"target_layer_ids": None}}, DrafterMismatchError, "target_layer_ids"),
        ({"dflash": {"mask_token_id": None}}, DrafterMismatchError, "mask_token_id"),
        ({"block_size": None}, DrafterMismatchError, "block_size"),
        ({"block_size": 1}, DrafterMismatchError, "block_size=1"),
        ({"use_sliding_window": True}, DrafterMismatchError, "sliding_window"),
        ({"intermediate_size": None}, DrafterMismatchError, "intermediate_size"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "relu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedModelError, "yarn"),
    ],
)
def test_a_drafter_config_that_lacks_or_breaks_a_field(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_drafter(drafter(**changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dflash": {"target_layer_ids": [1, 3, 9]}}, "target_layer_ids"),
        ({"dflash": {"target_layer_ids": [1, 3, 3]}}, "target_layer_ids"),
        ({"dflash": {"target_layer_ids": [-1, 2, 4]}}, "target_layer_ids"),
        ({"dflash": {"target_layer_ids": []}}, "target_layer_ids"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"vocab_size": 95}, "vocab_size"),
        ({"num_target_layers": 7}, "num_target_layers"),
        ({"dflash": {"mask_token_id": 96}}, "mask_token_id"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes: dict[str, Any], field: str) -> None:
    """T-048: one message names both models and the field."""
    config = read_drafter(drafter(**changes), name="the-drafter")
    with pytest.raises(DrafterMismatchError, match=f"the-drafter .*the-target.*{field}"):
        check_drafter(config, toy_target_config(), target_name="the-target")


def test_a_drafter_that_fits_passes() -> None:
    check_drafter(read_drafter(DRAFTER), toy_target_config(), target_name="t")


def test_a_deepspec_drafter_of_gemma_layers() -> None:
    config = read_drafter(DEEPSPEC)
    assert config.style is LayerStyle.GEMMA4
    assert config.layout is BlockLayout.NEXT_POSITION
    assert (config.block_size, config.max_draft_length, config.layout.num_slots(3)) == (7, 7, 3)
    assert [(spec.head_dim, spec.num_kv_heads, spec.values_are_keys) for spec in config.layers] == [(16, 1, True)] * 2
    assert config.layers[0].rope == RopeSpec(theta=1e6, rotated=0.25)
    assert config.layer_is_causal == (False, False)
    assert (config.attention_scale, config.activation, config.embedding_scale) == (1.0, "gelu_tanh", None)
    assert config.markov == MarkovSpec(kind=MarkovKind.VANILLA, rank=8)
    assert config.confidence == ConfidenceSpec(reads_markov=True)


def test_deepspecs_own_baseline_has_no_heads() -> None:
    config = read_drafter({**DEEPSPEC, "markov_rank": 0, "enable_confidence_head": False})
    assert (config.markov, config.confidence) == (None, None)


def test_a_deepspec_drafter_of_qwen_layers() -> None:
    heads = {"markov_rank": 4, "markov_head_type": "rnn", "enable_confidence_head": True}
    config = read_drafter(drafter(architectures=["Qwen3DSparkModel"], target_layer_ids=[1], mask_token_id=5, **heads))
    assert (config.style, config.layout) == (LayerStyle.PRE_NORM, BlockLayout.NEXT_POSITION)
    assert (config.embedding_scale, config.activation) == (1.0, "silu")
    assert config.markov == MarkovSpec(kind=MarkovKind.RNN, rank=4)
    assert config.confidence == ConfidenceSpec(reads_markov=False)


def test_a_drafter_of_the_speculators_library() -> None:
    config = read_drafter(SPECULATORS)
    assert config.target_layer_ids == (1, 3, 4)  # theirs count the embedding as 0
    assert (config.layout, config.block_size, config.max_draft_length) == (BlockLayout.NEXT_POSITION, 8, 8)
    assert (config.vocab_size, config.draft_vocab_size, config.hidden_size) == (96, 48, 32)
    assert (config.embedding_scale, config.final_logit_softcapping) == (1.0, None)
    assert config.layers[0].rope == RopeSpec(theta=5e5)
    assert [spec.window for spec in config.layers] == [16, None]
    assert config.windows_from_anchor
    assert config.layer_is_causal == (True, False)
    assert read_drafter({**SPECULATORS, "sliding_window_non_causal": True}).layer_is_causal == (False, False)


def test_a_speculators_dflash_predicts_its_own_positions() -> None:
    config = read_drafter({**SPECULATORS, "speculators_model_type": "dflash", "markov_rank": None})
    assert (config.layout, config.max_draft_length, config.markov) == (BlockLayout.SAME_POSITION, 7, None)


def test_what_speculators_leaves_out_is_the_default_of_qwen3() -> None:
    """Their file holds only what differs from transformers' Qwen3 config."""
    from transformers import Qwen3Config

    theirs, config = Qwen3Config(), read_drafter({**SPECULATORS, "transformer_layer_config": {}})
    assert (config.hidden_size, config.intermediate_size) == (theirs.hidden_size, theirs.intermediate_size)
    assert (config.num_heads, config.vocab_size) == (theirs.num_attention_heads, theirs.vocab_size)
    assert len(config.layers) == theirs.num_hidden_layers
    layer = config.layers[0]
    assert (layer.head_dim, layer.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert layer.rope.theta == theirs.rope_parameters["rope_theta"]
    assert layer.kind is LayerKind.FULL


def test_the_hybrid_is_dflash_with_a_markov_head() -> None:
    root = read_drafter(drafter(markov_rank=8, markov_head_type="vanilla"))
    assert (root.layout, root.markov) == (BlockLayout.SAME_POSITION, MarkovSpec(kind=MarkovKind.VANILLA, rank=8))
    assert replace(root, markov=None) == read_drafter(DRAFTER)  # its `backbone-only`


@pytest.mark.parametrize("nested", [True, False])
def test_scales_are_declared(nested: bool) -> None:
    scales = {"input_embedding_scale": 3.5, "output_multiplier": 0.5}
    config = read_drafter(drafter(scales) if nested else drafter(**scales))
    assert (config.embedding_scale, config.output_multiplier) == (3.5, 0.5)
    assert read_drafter(drafter({"scale_block_embeddings": False})).embedding_scale == 1.0


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DEEPSPEC, {"enable_moe_block": True}, "enable_moe_block"),
        (DEEPSPEC, {"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        (DEEPSPEC, {"hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input"),
        (DEEPSPEC, {"markov_head_type": "lstm"}, "lstm"),
        (DEEPSPEC, {"markov_rank": 0}, "confidence_head_with_markov"),
        (DEEPSPEC, {"markov_rank": -1}, "markov_rank"),
        (DEEPSPEC, {"block_size": 0}, "block_size"),
        (DEEPSPEC, {"num_speculative_tokens": 8}, "num_speculative_tokens"),
        (SPECULATORS, {"speculators_model_type": "eagle3"}, "eagle3"),
        (SPECULATORS, {"transformer_layer_config": {"model_type": "llama"}}, "qwen3"),
        (SPECULATORS, {"transformer_layer_config": None}, "transformer_layer_config"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        (SPECULATORS, {"mask_token_id": None}, "mask_token_id"),
        (SPECULATORS, {"draft_vocab_size": 97}, "draft_vocab_size"),
    ],
)
def test_what_a_dialect_may_not_say(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises((DrafterMismatchError, UnsupportedModelError), match=message):
        read_drafter({**config, **changes})


@pytest.mark.parametrize("changes", [{"head_dim": 7}, {"num_key_value_heads": 3}, {"head_dim": 1}])
def test_heads_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    """Tensors can be made to match them, so that nothing else would notice before the first pass."""
    with pytest.raises(WeightsError, match=r"config\.json: (head_dim=\d is odd|4 attention heads cannot share 3)"):
        read_drafter(drafter(**changes))


def test_a_tap_on_the_embedding_is_refused() -> None:
    config = read_drafter({**SPECULATORS, "aux_hidden_state_layer_ids": [0, 3]})
    with pytest.raises(DrafterMismatchError, match="target_layer_ids"):
        check_drafter(config, toy_target_config(), target_name="t")
