"""What configs say and what they may not say."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.models.config import LayerKind, RopeSpec, TargetConfig, gemma3_config
from outrider.weights.fields import Fields

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


def read_target(config: dict[str, Any]) -> TargetConfig:
    return gemma3_config(Fields(config, source="config.json"), norm_offset=1.0)


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
