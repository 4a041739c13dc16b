"""What Gemma 4 configs say and what they may not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import OutriderError, UnsupportedModelError, WeightsError
from outrider.models.config import ExpertsSpec, LayerKind, PerLayerSpec, Placeholder, RopeSpec, TargetConfig
from outrider.models.gemma4_config import gemma4_config, gemma4_multimodal_config, gemma4_unified_config
from outrider.weights.fields import Fields

SLIDING, FULL = "sliding_attention", "full_attention"
DENSE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
    "eos_token_id": [1, 106],
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 2e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 2e6},
    },
}
YARN = {**DENSE["rope_parameters"], SLIDING: {"rope_type": "yarn", "rope_theta": 1e4}}


def read(**changes: Any) -> TargetConfig:
    """DENSE with changes; `...` removes a field."""
    config = {key: value for key, value in {**DENSE, **changes}.items() if value is not ...}
    return gemma4_config(Fields(config, source="a-target"), norm_offset=0.0)


def shapes(config: TargetConfig) -> list[tuple[int, int, bool]]:
    return [(spec.head_dim, spec.num_kv_heads, spec.values_are_keys) for spec in config.layers]


def test_fields_of_a_dense_model() -> None:
    config = read()
    assert [spec.window for spec in config.layers] == [8, 8, None]
    assert shapes(config) == [(16, 2, False), (16, 2, False), (32, 1, True)]
    assert {spec.kind: spec.rope for spec in config.layers} == {
        LayerKind.SLIDING: RopeSpec(theta=2e4),
        LayerKind.FULL: RopeSpec(theta=2e6, rotated=0.5),
    }
    assert (config.attention_scale, config.norm_offset, config.final_logit_softcapping) == (1.0, 0.0, 30.0)
    assert config.norms_values
    assert config.has_layer_scalars
    assert config.eos_token_ids == (1, 106)


def test_defaults() -> None:
    config = read(rope_parameters=..., global_head_dim=..., final_logit_softcapping=..., attention_k_eq_v=...)
    assert config.layers[0].rope == RopeSpec(theta=1e4)
    assert config.layers[2].rope == RopeSpec(theta=1e6, rotated=0.25)
    assert shapes(config)[2] == (512, 2, False)  # heads of their own come with K=V only
    assert config.final_logit_softcapping is None


def test_experts_count_only_where_they_are_enabled() -> None:
    fields = {"num_experts": 16, "top_k_experts": 8, "moe_intermediate_size": 24}
    expected = ExpertsSpec(num_experts=16, num_chosen=8, intermediate_size=24)
    assert read(enable_moe_block=True, **fields).experts == expected
    assert read(enable_moe_block=False, **fields).experts is None


@pytest.mark.parametrize("field", ["num_experts", "top_k_experts", "moe_intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.5, "x", True])
def test_experts_fields_are_refused_by_name(field: str, value: Any) -> None:
    fields = {"num_experts": 16, "top_k_experts": 8, "moe_intermediate_size": 24, field: value}
    with pytest.raises(WeightsError, match=f"^a-target has {field}=.*; expected "):
        read(enable_moe_block=True, **fields)
    with pytest.raises(WeightsError, match=r"top_k_experts=17.*from 1 to 16"):
        read(enable_moe_block=True, num_experts=16, top_k_experts=17, moe_intermediate_size=24)


def test_the_last_layers_read_the_last_earlier_layer_of_their_kind() -> None:
    kinds = [FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]
    shared = {"layer_types": kinds, "num_hidden_layers": 7, "num_kv_shared_layers": 3}
    layers = read(**shared, use_double_wide_mlp=True).layers
    assert [spec.cache_source for spec in layers] == [None, None, None, None, 2, 2, 3]
    assert [spec.mlp_multiple for spec in layers] == [1, 1, 1, 1, 2, 2, 2]
    assert {spec.mlp_multiple for spec in read(**shared).layers} == {1}


def test_per_layer_embeddings() -> None:
    assert read(hidden_size_per_layer_input=0).per_layer is None
    config = read(hidden_size_per_layer_input=12, vocab_size_per_layer_input=130)
    assert config.per_layer == PerLayerSpec(vocab_size=130, size=12)
    with pytest.raises(WeightsError, match=r"vocab_size_per_layer_input=127.*from 128"):
        read(hidden_size_per_layer_input=12, vocab_size_per_layer_input=127)


def test_both_layouts_of_head_shapes_say_the_same() -> None:
    newer = {"2": {"head_dim": 32, "num_key_value_heads": 1}}
    assert read(per_layer_config=newer, global_head_dim=..., num_global_key_value_heads=...) == read()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_activation": "relu"}, UnsupportedModelError, "hidden_activation 'relu'"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "use_bidirectional_attention='all'"),
        ({"tie_word_embeddings": False}, UnsupportedModelError, "tie_word_embeddings=False"),
        ({"layer_types": [SLIDING, FULL, SLIDING]}, WeightsError, "layer_types must end with"),
        ({"layer_types": [FULL]}, WeightsError, "1 layer_types"),
        ({"num_key_value_heads": 3}, WeightsError, "4 attention heads cannot share 3"),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, UnsupportedModelError, r"per_layer_config\.1\.sliding"),
        ({"rope_parameters": YARN}, UnsupportedModelError, "'yarn' of sliding_attention"),
        ({"sliding_window": ...}, WeightsError, "lacks sliding_window"),
        ({"hidden_size_per_layer_input": ...}, WeightsError, "lacks hidden_size_per_layer_input"),
        ({"num_kv_shared_layers": 1}, WeightsError, "num_kv_shared_layers leaves no full_attention layer"),
        ({"num_kv_shared_layers": 3}, WeightsError, "num_kv_shared_layers=3.*from 0 to 2"),
    ],
)
def test_a_target_we_cannot_run_is_refused(changes: dict[str, Any], error: type[OutriderError], message: str) -> None:
    with pytest.raises(error, match=message):
        read(**changes)


NO_SIZE = [0, -1, 2.5, float("nan"), "x", "", [], True]
NO_FLAG = [0, 1, "x", [], {}]
WRONG: dict[str, list[Any]] = {
    "global_head_dim": NO_SIZE,
    "num_global_key_value_heads": NO_SIZE,
    "num_kv_shared_layers": [None, -1, 2.5, "x", True],
    "hidden_size_per_layer_input": [None, -1, 2.5, "x", True],
    "attention_k_eq_v": [None, *NO_FLAG],
    "attention_bias": NO_FLAG,
    "enable_moe_block": NO_FLAG,
    "use_double_wide_mlp": NO_FLAG,
    "use_bidirectional_attention": [1, True, []],
    "per_layer_config": [1, "x", {"2": {"head_dim": 0}}, {"2": 5}],
    "rope_parameters": [
        1,
        {SLIDING: DENSE["rope_parameters"][SLIDING]},
        *(
            {**DENSE["rope_parameters"], FULL: {**DENSE["rope_parameters"][FULL], key: value}}
            for key, value in (("partial_rotary_factor", 2), ("partial_rotary_factor", 0), ("rope_theta", 0))
        ),
    ],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(WeightsError, match=f"^a-target (has|lacks) {field}.*; expected "):
        read(**{field: value})


def test_unified_text_is_the_dense_decoder() -> None:
    config = {key: value for key, value in DENSE.items() if key != "hidden_size_per_layer_input"}
    unified = gemma4_unified_config(Fields(config, source="a-target"), norm_offset=0.0)
    assert unified == replace(read(), model_type="gemma4_unified_text")


@pytest.mark.parametrize(("field", "value"), [("enable_moe_block", True), ("hidden_size_per_layer_input", 8)])
def test_what_unified_text_lacks_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        gemma4_unified_config(Fields({**DENSE, field: value}, source="a-target"), norm_offset=0.0)


def test_the_text_part_of_a_multimodal_config() -> None:
    wrapped = {"text_config": {**DENSE, "model_type": "gemma4_text"}, "tie_word_embeddings": True}
    config = gemma4_multimodal_config(Fields(wrapped, source="a-target"), norm_offset=0.0)
    expected = replace(
        read(),
        tensor_prefix=config.tensor_prefix,
        skipped_tensors=config.skipped_tensors,
        placeholders=config.placeholders,
    )
    assert config == expected
    assert config.tensor_prefix == "model.language_model"


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
def test_placeholders_are_those_declared_else_those_of_every_release(model_type: str) -> None:
    wrapped = {"text_config": {**DENSE, "model_type": model_type}, "image_token_id": 91, "video_token_id": None}
    config = gemma4_multimodal_config(Fields(wrapped, source="a-target"), norm_offset=0.0)
    assert config.placeholders == (
        Placeholder(text="<|image|>", token_id=91),
        Placeholder(text="<|audio|>", token_id=258_881),
        Placeholder(text="<|video|>", token_id=258_884),
    )
    assert read().placeholders == ()


@pytest.mark.parametrize("value", [-1, "91", 2.5])
def test_a_placeholder_that_is_no_id_is_refused(value: Any) -> None:
    wrapped = {"text_config": {**DENSE, "model_type": "gemma4_text"}, "audio_token_id": value}
    with pytest.raises(WeightsError, match="audio_token_id"):
        gemma4_multimodal_config(Fields(wrapped, source="a-target"), norm_offset=0.0)


def test_the_pad_token_is_declared_or_0() -> None:
    assert (read(pad_token_id=7).pad_token_id, read().pad_token_id, read(pad_token_id=None).pad_token_id) == (7, 0, 0)
    with pytest.raises(WeightsError, match="pad_token_id=128"):
        read(pad_token_id=128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "a-target has text_config=None"),
        ({"text_config": {**DENSE, "model_type": "llama"}}, "text_config.model_type 'llama'"),
        ({"text_config": {**DENSE, "model_type": "gemma4_text", "head_dim": 0}}, r"text_config\.head_dim=0"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
    ],
)
def test_a_multimodal_config_we_cannot_run_is_refused(changes: dict[str, Any], message: str) -> None:
    wrapped = {"text_config": {**DENSE, "model_type": "gemma4_text"}, **changes}
    with pytest.raises(OutriderError, match=message):
        gemma4_multimodal_config(Fields(wrapped, source="a-target"), norm_offset=0.0)
