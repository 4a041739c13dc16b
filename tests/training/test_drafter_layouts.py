"""Names, keys and values of each layout, against a written contract and not against the rule that reads it (T-075)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, OutriderError
from outrider.models.config import LayerKind, LayerSpec, RopeSpec
from outrider.models.drafter_config import (
    BlockLayout,
    ConfidenceSpec,
    DrafterConfig,
    LayerStyle,
    MarkovKind,
    MarkovSpec,
)
from outrider.models.registry import drafter_config
from outrider.training.drafter_layouts import LAYOUTS, About, Tables, find_layout, forward_pass, layout_config

SLIDING = LayerSpec(kind=LayerKind.SLIDING, num_kv_heads=2, head_dim=8, window=6, rope=RopeSpec(theta=1e6))
FULL = replace(SLIDING, kind=LayerKind.FULL, window=None)
GEMMA4 = LayerSpec(
    kind=LayerKind.FULL,
    num_kv_heads=1,
    head_dim=16,
    window=None,
    rope=RopeSpec(theta=1e6, rotated=0.25),
    values_are_keys=True,
)
ZLAB = DrafterConfig(
    name="tiny",
    hidden_size=32,
    intermediate_size=40,
    num_heads=4,
    layers=(SLIDING, FULL),
    layer_is_causal=(True, True),
    rms_norm_eps=1e-6,
    activation="silu",
    layout=BlockLayout.SAME_POSITION,
    block_size=5,
    mask_token_id=4,
    target_layer_ids=(1, 3, 4),
    num_target_layers=6,
    vocab_size=96,
    draft_vocab_size=96,
    embedding_scale=None,
    final_logit_softcapping=5.0,
    num_speculative_tokens=3,
)
DSPARK = replace(
    ZLAB,
    layers=(GEMMA4, GEMMA4),
    layer_is_causal=(False, False),
    style=LayerStyle.GEMMA4,
    activation="gelu_tanh",
    layout=BlockLayout.NEXT_POSITION,
    markov=MarkovSpec(kind=MarkovKind.VANILLA, rank=8),
    confidence=ConfidenceSpec(reads_markov=True),
)
SPECULATORS = replace(
    ZLAB,
    layer_is_causal=(True, False),
    embedding_scale=1.0,
    final_logit_softcapping=None,
    windows_from_anchor=True,
    draft_vocab_size=64,
)
UNSCALED = replace(ZLAB, embedding_scale=1.0, draft_vocab_size=64)


def written(layout: str, drafter: DrafterConfig) -> dict[str, Any]:
    about = About(target_name="google/gemma-4-31B-it", target_architectures=("Gemma4ForConditionalGeneration",))
    return layout_config(find_layout(layout), drafter, about)


QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "max_position_embeddings": 262144,
    "vocab_size": 96,
    "attention_bias": False,
}


def test_z_lab() -> None:
    """formats.md §2.2: ids in dflash_config, windows and soft-cap at top level; causal on, window 6, cap 5, B = 5."""
    assert written("z-lab", ZLAB) == {
        **QWEN3,
        "architectures": ["DFlashDraftModel"],
        "rope_theta": 1e6,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "block_size": 5,
        "num_target_layers": 6,
        "final_logit_softcapping": 5.0,
        "is_causal": True,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 3, 4]},
    }


def test_vllm_reads_z_labs_keys_and_the_reduced_vocabulary() -> None:
    """formats.md §5: layers are causal by `is_causal`, and ids are z-lab's; `draft_vocab_size` sizes head and d2t."""
    expected = written("z-lab", replace(ZLAB, embedding_scale=1.0)) | {"draft_vocab_size": 64}
    assert written("vllm", UNSCALED) == expected
    assert expected["dflash_config"]["input_embedding_scale"] == 1.0
    assert find_layout("vllm").tables(UNSCALED) is Tables.OWN_HEAD
    assert find_layout("vllm").tables(DSPARK) is Tables.OWN_BOTH


def test_speculators() -> None:
    """formats.md §2.5: ids count one more, fields of the layers are nested, block embeddings are not scaled."""
    assert written("speculators", SPECULATORS) == {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "tie_word_embeddings": False,
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 5,
        "draft_vocab_size": 64,
        "mask_token_id": 4,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 4, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {
                "name_or_path": "google/gemma-4-31B-it",
                "architectures": ["Gemma4ForConditionalGeneration"],
            },
        },
        "transformer_layer_config": {
            **QWEN3,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "tie_word_embeddings": True,
        },
    }
    heads = replace(SPECULATORS, markov=DSPARK.markov, layout=BlockLayout.NEXT_POSITION)
    dspark = written("speculators", heads)
    kept = ("architectures", "speculators_model_type", "sample_from_anchor", "markov_rank", "markov_head_type")
    assert [dspark[key] for key in kept] == [["DSparkDraftModel"], "dspark", True, 8, "vanilla"]
    assert dspark["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    two_way = written("speculators", replace(SPECULATORS, layer_is_causal=(False, False)))
    assert two_way["sliding_window_non_causal"] is True


@pytest.mark.parametrize("layout", ["deepspec", "vllm"])
def test_deepspec(layout: str) -> None:
    """formats.md §3.5 and §3.6: fields of a Gemma 4 text config, DSpark's beside them at top level."""
    assert written(layout, DSPARK) == {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": True,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": 262144,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "max_position_embeddings": 262144,
        "vocab_size": 96,
        "tie_word_embeddings": False,
        "block_size": 5,
        "mask_token_id": 4,
        "target_layer_ids": [1, 3, 4],
        "num_target_layers": 6,
        "final_logit_softcapping": 5.0,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


WHOLE = [("z-lab", ZLAB), ("vllm", UNSCALED), ("speculators", SPECULATORS), ("deepspec", DSPARK), ("outrider", DSPARK)]
DECIDES_NOTHING = {  # keys whose absence changes no draft: names, sizes of tables, training, defaults spelt out
    *("model_type", "attention_bias", "max_window_layers", "max_position_embeddings", "tie_word_embeddings"),
    *("num_target_layers", "rope_scaling", "rms_norm_eps", "hidden_act", "hidden_activation", "use_sliding_window"),
    *("auto_map", "architectures", "speculators_version", "target_hidden_size", "speculators_config", "head_dim"),
    *("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp", "enable_moe_block"),
    *("num_global_key_value_heads", "rope_theta", "markov_head_type", "num_speculative_tokens", "draft_vocab_size"),
    *("sample_from_anchor", "sliding_window_non_causal", "global_head_dim", "rope_parameters"),
}


@pytest.mark.parametrize(("layout", "drafter"), WHOLE)
def test_no_key_that_decides_may_be_missing(layout: str, drafter: DrafterConfig) -> None:
    config = written(layout, drafter)
    for key in config.keys() - DECIDES_NOTHING:
        less = {name: value for name, value in config.items() if name != key}
        try:
            read = forward_pass(drafter_config(less, source=Path("tiny")))
        except OutriderError:
            continue
        assert read != forward_pass(drafter), key


@pytest.mark.parametrize(
    ("layout", "drafter", "problem"),
    [
        ("z-lab", DSPARK, "anchor's slot predicts too; it has a Markov or confidence head"),
        ("z-lab", UNSCALED, "its vocabulary is reduced to 64 tokens"),
        ("z-lab", replace(ZLAB, layer_is_causal=(False, True)), r"layer_is_causal \(False, True\) would be read"),
        ("z-lab", replace(ZLAB, layers=(SLIDING, replace(FULL, head_dim=16))), "layers .* would be read"),
        ("outrider", SPECULATORS, "windows_from_anchor True would be read False"),
        ("deepspec", ZLAB, "its slots predict their own positions"),
        ("deepspec", replace(ZLAB, layout=BlockLayout.NEXT_POSITION), "which Qwen3DSparkModel does not do"),
        ("deepspec", replace(DSPARK, draft_vocab_size=64), "reduced to 64"),
        ("speculators", replace(SPECULATORS, embedding_scale=None), "train it with unscaled ones"),
        ("speculators", replace(SPECULATORS, final_logit_softcapping=5.0), "its logits are soft-capped"),
        ("speculators", replace(SPECULATORS, windows_from_anchor=False), "count back from each slot"),
        ("speculators", replace(SPECULATORS, layer_is_causal=(True, True)), "layer_is_causal"),
        ("speculators", DSPARK, "its layers are Gemma 4's"),
        ("vllm", ZLAB, "stock vLLM feeds raw ones"),
        ("vllm", SPECULATORS, "vLLM reads the speculators layout"),
        ("vllm", replace(UNSCALED, markov=DSPARK.markov), "no heads there"),
        ("vllm", replace(UNSCALED, output_multiplier=2.0), "multiplied by 2"),
        ("vllm", replace(DSPARK, markov=MarkovSpec(kind=MarkovKind.RNN, rank=8)), "of kind 'vanilla'"),
        ("vllm", replace(DSPARK, markov=None, confidence=None), "needs a Markov head"),
        ("vllm", replace(DSPARK, draft_vocab_size=64), "reduced to 64"),
        ("vllm", replace(DSPARK, layers=(replace(GEMMA4, values_are_keys=False),) * 2), "K = V"),
    ],
)
def test_what_cannot_be_said_is_named(layout: str, drafter: DrafterConfig, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"layout {layout} cannot say what drafter tiny is: .*{problem}"):
        written(layout, drafter)


def test_drafters_that_draft_alike_compare_equal() -> None:
    assert forward_pass(replace(ZLAB, embedding_scale=32**0.5, name="other")) == forward_pass(ZLAB)
    assert forward_pass(replace(ZLAB, embedding_scale=5.0)) != forward_pass(ZLAB)
    full = replace(ZLAB, layers=(FULL, FULL))
    assert forward_pass(replace(full, windows_from_anchor=True)) == forward_pass(full)
    assert forward_pass(replace(ZLAB, windows_from_anchor=True)) != forward_pass(ZLAB)


def test_linear_rope_is_said_in_each_dialect() -> None:
    long = tuple(replace(spec, rope=RopeSpec(theta=1e6, factor=4.0)) for spec in (SLIDING, FULL))
    assert written("z-lab", replace(ZLAB, layers=long))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    nested = written("speculators", replace(SPECULATORS, layers=long))["transformer_layer_config"]
    assert nested["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0}


def test_an_unknown_layout_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'gguf' is not known. Use one of outrider, z-lab, deepspec, speculators"):
        find_layout("gguf")
    assert [layout.name for layout in LAYOUTS.values()] == list(LAYOUTS)
