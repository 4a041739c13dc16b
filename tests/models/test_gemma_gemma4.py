"""The target against transformers' Gemma 4 in its released shapes, shrunken, layer by layer and past the window's edge.

transformers runs the whole text in one pass; ours runs it in chunks over caches, so that rows before, at and after the
window's edge come from prefill and from decoding alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from outrider.errors import WeightsError
from outrider.kernels.cpu import CpuKernels
from outrider.kernels.ops import Kernels
from outrider.kernels.reference import TorchKernels
from outrider.models.config import TargetConfig
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import load_target, target_config
from outrider.weights.loader import Checkpoint
from outrider.weights.packed import DenseWeight
from tests.models.test_gemma import CHUNKINGS, CONTEXT_LENGTH, NUM_TOKENS, decode, expected_outputs, kernel_set
from tests.toy import CPU

SIZE, VOCAB = 64, 128
TOLERANCE = 1e-5  # of a layer's largest number; transformers takes norms and rotary tables in float32

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": None,
    "sliding_window": 8,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_hidden_layers": 6,
    "rope_parameters": ROPE,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "31B": {"num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
    "26B-A4B": {
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 8,
        "moe_intermediate_size": 32,
        "experts_implementation": "eager",
    },
    "E4B": {
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 3,
    },
    "E2B": {
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCAB,
        "num_key_value_heads": 1,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "12B": {
        "model_type": "gemma4_unified_text",
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
    },
    "scaled rotation": {
        "attention_k_eq_v": False,
        "final_logit_softcapping": None,
        "rope_parameters": {**ROPE, FULL: {**ROPE[FULL], "partial_rotary_factor": 0.5, "factor": 4.0}},
    },
}
FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "gemma4_text": (Gemma4TextConfig, Gemma4ForCausalLM),
    "gemma4_unified_text": (Gemma4UnifiedTextConfig, Gemma4UnifiedForCausalLM),
}
MULTIMODAL = {"E4B": Gemma4ForConditionalGeneration, "12B": Gemma4UnifiedForConditionalGeneration}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def shrunken_model(shape: str, dtype: torch.dtype) -> PreTrainedModel:
    """All weights random; norms and scales spread around 1, so that one left out or taken for another shows."""
    fields = {**BASE, **SHAPES[shape]}
    config_class, model_class = FAMILIES[fields.pop("model_type", "gemma4_text")]
    model = model_class(config_class(**fields, attn_implementation="eager")).to(dtype).eval()
    generator = torch.Generator().manual_seed(5)
    for name, stored in model.state_dict().items():
        noise = torch.randn(stored.shape, generator=generator, dtype=torch.float64)
        is_factor = stored.ndim == 1
        stored.copy_(1.0 + 0.4 * noise if is_factor else (0.2 if "embed" in name else 0.1) * noise)
    return model


def as_checkpoint(model: PreTrainedModel) -> Checkpoint:
    tensors = {
        name: DenseWeight(name, value.detach().clone())
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    source = Path("shrunken")
    return Checkpoint(model.config.to_dict(), tensors, 0.0, source, source=source, source_sha256="")


def loaded(model: PreTrainedModel, kernels: Kernels, dtype: torch.dtype) -> GemmaTarget:
    return load_target(as_checkpoint(model), kernels=kernels, dtype=dtype, device=CPU, context_length=CONTEXT_LENGTH)


def random_tokens() -> Tensor:
    return torch.randint(VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def worst_error(target: GemmaTarget, model: PreTrainedModel, chunks: list[int]) -> float:
    """Of every layer and of the logits, relative to the largest number of each."""
    layers, logits = expected_outputs(model, random_tokens())
    outputs = decode(target, random_tokens(), chunks)
    ours = [*outputs.split(SIZE, dim=1), target.logits(outputs[:, -SIZE:])]
    return max(relative_error(*pair) for pair in zip(ours, [*layers, logits], strict=True))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("kernel_name", ["float64", "float32", "cpu"])
@every_shape
def test_agrees_with_transformers(shape: str, kernel_name: str, request: pytest.FixtureRequest) -> None:
    kernels, dtype = kernel_set(kernel_name, request)
    model = shrunken_model(shape, dtype)
    target = loaded(model, kernels, dtype)
    for chunks in CHUNKINGS:
        assert worst_error(target, model, chunks) < TOLERANCE, chunks


@every_shape
def test_chunks_give_the_same_bits_with_row_invariant_kernels(shape: str, cpu_kernels: CpuKernels) -> None:
    target, token_ids = loaded(shrunken_model(shape, torch.float32), cpu_kernels, torch.float32), random_tokens()
    whole, *others = [decode(target, token_ids, chunks) for chunks in CHUNKINGS]
    assert all(torch.equal(whole, other) for other in others)


def without_rotation_share(config: TargetConfig) -> TargetConfig:
    turned = [replace(spec, rope=replace(spec.rope, rotated=1.0)) for spec in config.layers]
    return replace(config, layers=tuple(turned))


def with_a_wider_window(config: TargetConfig) -> TargetConfig:
    return replace(
        config, layers=tuple(replace(spec, window=spec.window and spec.window + 1) for spec in config.layers)
    )


def with_one_expert_fewer(config: TargetConfig) -> TargetConfig:
    assert config.experts is not None
    return replace(config, experts=replace(config.experts, num_chosen=config.experts.num_chosen - 1))


def with_another_source(config: TargetConfig) -> TargetConfig:
    """Sliding readers take the first sliding layer's keys and values."""
    layers = [replace(spec, cache_source=spec.cache_source and spec.cache_source - 1) for spec in config.layers[:-1]]
    return replace(config, layers=(*layers, config.layers[-1]))


MUTANTS: dict[str, tuple[str, Callable[[TargetConfig], TargetConfig]]] = {
    "no V norm": ("31B", lambda config: replace(config, norms_values=False)),
    "every pair turns": ("31B", without_rotation_share),
    "a scaled softmax": ("31B", lambda config: replace(config, attention_scale=0.25)),
    "no soft-cap": ("31B", lambda config: replace(config, final_logit_softcapping=None)),
    "a window of 9": ("31B", with_a_wider_window),
    "one expert fewer": ("26B-A4B", with_one_expert_fewer),
    "another layer's keys": ("E4B", with_another_source),
    "norms of 1 + weight": ("31B", lambda config: replace(config, norm_offset=1.0)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_difference_left_out_shows(mutant: str) -> None:
    shape, change = MUTANTS[mutant]
    model, kernels = shrunken_model(shape, torch.float64), TorchKernels(torch.float64)
    checkpoint = as_checkpoint(model)
    target = GemmaTarget(
        change(target_config(checkpoint)),
        checkpoint,
        kernels=kernels,
        dtype=torch.float64,
        device=CPU,
        context_length=CONTEXT_LENGTH,
    )
    assert worst_error(target, model, [NUM_TOKENS]) > 1e-2


def test_layer_scalars_are_claimed() -> None:
    """A decoder without them would leave them over."""
    checkpoint = as_checkpoint(shrunken_model("31B", torch.float64))
    del checkpoint.tensors["model.layers.2.layer_scalar"]
    with pytest.raises(WeightsError, match=r"model\.layers\.2\.layer_scalar is missing"):
        load_target(
            checkpoint,
            kernels=TorchKernels(torch.float64),
            dtype=torch.float64,
            device=CPU,
            context_length=CONTEXT_LENGTH,
        )


def test_unused_keys_and_values_are_skipped_where_a_layer_reads_anothers_and_only_there() -> None:
    model, kernels = shrunken_model("E4B", torch.float64), TorchKernels(torch.float64)
    checkpoint = as_checkpoint(model)
    unused = DenseWeight("unused", torch.zeros(32, SIZE))
    checkpoint.tensors["model.layers.3.self_attn.k_proj.weight"] = unused
    place = {"kernels": kernels, "dtype": torch.float64, "device": CPU, "context_length": CONTEXT_LENGTH}
    assert worst_error(load_target(checkpoint, **place), model, [NUM_TOKENS]) < TOLERANCE
    checkpoint.tensors["model.layers.3.self_attn.surprise.weight"] = unused
    with pytest.raises(WeightsError, match=r"layers\.3\.self_attn\.surprise"):
        load_target(checkpoint, **place)


@pytest.mark.parametrize("shape", ["E4B", "12B"])
def test_the_text_part_of_a_multimodal_checkpoint(shape: str) -> None:
    """Its names as transformers has them; towers are skipped, anything else is not."""
    model, kernels = shrunken_model(shape, torch.float64), TorchKernels(torch.float64)
    whole_class, text = MULTIMODAL[shape], as_checkpoint(model)
    with torch.device("meta"):
        whole = whole_class(whole_class.config_class(text_config=model.config, vision_config={}, audio_config={}))
    others = [name for name in whole.state_dict() if not name.startswith(("model.language_model.", "lm_head."))]
    tensors = {name.replace("model.", "model.language_model.", 1): weight for name, weight in text.tensors.items()}
    assert set(whole.state_dict()) == {*tensors, *others, "lm_head.weight"}
    assert others
    tensors |= {name: DenseWeight(name, torch.zeros(1)) for name in others}
    config = {"model_type": whole.config.model_type, "text_config": text.config, "eos_token_id": [1, 106]}
    checkpoint = replace(text, config=config, tensors=tensors)
    place = {"kernels": kernels, "dtype": torch.float64, "device": CPU, "context_length": CONTEXT_LENGTH}
    target = load_target(checkpoint, **place)
    assert worst_error(target, model, [NUM_TOKENS]) < TOLERANCE
    assert target.config.eos_token_ids == (1, 106)
    tensors["model.surprise.weight"] = DenseWeight("surprise", torch.zeros(1))
    with pytest.raises(WeightsError, match=r"model\.surprise"):
        load_target(checkpoint, **place)
