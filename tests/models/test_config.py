"""What configs say and what they may not say."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import DrafterMismatchError, UnsupportedModelError, WeightsError
from outrider.models.config import (
    DrafterConfig,
    LayerKind,
    RopeSpec,
    TargetConfig,
    check_drafter,
    dflash_config,
    gemma3_config,
)
from outrider.weights.fields import Fields
from tests.toy import toy_target_config

GEMMA3: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 64,
}
DRAFTER: dict[str, Any] = {
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


def drafter(dflash: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """DRAFTER with changes at top level and in dflash_config; None removes a field."""
    nested = {**DRAFTER["dflash_config"], **(dflash or {})}
    merged = {**DRAFTER, **changes, "dflash_config": {k: v for k, v in nested.items() if v is not None}}
    return {key: value for key, value in merged.items() if value is not None}


def read_target(config: dict[str, Any]) -> TargetConfig:
    return gemma3_config(Fields(config, source="config.json"), norm_offset=1.0)


def read_drafter(config: dict[str, Any], *, name: str = "d") -> DrafterConfig:
    return dflash_config(Fields(config, source=f"{name}/config.json", error=DrafterMismatchError), name=name)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_theta": 5e5, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
)
def test_both_rope_layouts_say_the_same(rope: dict[str, Any]) -> None:
    layers = read_target({**GEMMA3, **rope}).layers
    assert [spec.window for spec in layers] == [8, 8, None, 8, 8, None]
    assert {spec.kind: spec.rope for spec in layers} == {
        LayerKind.FULL: RopeSpec(theta=5e5, factor=8.0),
        LayerKind.SLIDING: RopeSpec(theta=1e4),
    }


def test_fields_of_gemma3_and_their_defaults() -> None:
    config = read_target({**GEMMA3, "eos_token_id": [1, 106]})
    assert config.attention_scale == 1 / 8
    assert config.embedding_scale == 8.0
    assert config.eos_token_ids == (1, 106)
    assert config.final_logit_softcapping is None
    assert config.max_positions == 131_072
    assert config.layers[0].rope == RopeSpec(theta=1e4)
    assert config.layers[2].rope == RopeSpec(theta=1e6)
    assert read_target(GEMMA3).eos_token_ids == ()


def test_listed_layer_types_win_over_the_pattern() -> None:
    names = ["full_attention"] * 5 + ["sliding_attention"]
    layers = read_target({**GEMMA3, "layer_types": names}).layers
    assert [spec.kind.value for spec in layers] == names


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"head_dim": None}, WeightsError, "head_dim"),
        ({"layer_types": ["full_attention"]}, WeightsError, "layer_types"),
        ({"layer_types": ["full_attention"] * 5 + ["chunked"]}, UnsupportedModelError, "chunked"),
        ({"rope_parameters": {"full_attention": {}}}, WeightsError, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, UnsupportedModelError, "yarn"),
        ({"hidden_activation": "relu"}, UnsupportedModelError, "relu"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModelError, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention"),
    ],
)
def test_a_target_we_cannot_run_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_target({**GEMMA3, **changes})


def test_fields_of_a_drafter() -> None:
    config = read_drafter(DRAFTER)
    assert config.target_layer_ids == (1, 3, 4)
    assert config.mask_token_id == 95
    assert config.max_draft_length == config.num_speculative_tokens == 4
    assert config.draft_vocab_size == 96
    assert config.scale_block_embeddings
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
