"""DeepSpec's DSpark drafters (GitHub deepseek-ai/DeepSpec): Gemma 4 and Qwen3 layers, three Markov heads."""

from __future__ import annotations

from typing import Any

import torch
from deepspec.eval.dspark.draft_ops import forward_dspark_draft_block
from deepspec.modeling.dspark.gemma4 import Gemma4DSparkModel
from deepspec.modeling.dspark.gemma4.config import build_draft_config as gemma4_draft_config
from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel
from deepspec.modeling.dspark.qwen3.config import build_draft_config as qwen3_draft_config
from torch import Tensor, nn
from transformers import DynamicCache, Gemma4Config, PretrainedConfig, Qwen3Config

from drafter_originals.case import (
    ANCHOR_POSITIONS,
    ANCHOR_TOKEN_IDS,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    MARKOV_RANK,
    MASK_TOKEN_ID,
    NUM_ROWS,
    NUM_TARGET_LAYERS,
    QWEN3_FIELDS,
    TARGET_LAYER_IDS,
    Case,
    anchors,
    block_ids,
    drawn,
    fill,
    gemma4_text_config,
    generator_of,
    stacked,
)

ORIGINAL = "DeepSpec @afdfa7c9382a (deepseek-ai, GitHub)"
NUM_SLOTS = 7


class _ModelArgs(dict[str, Any]):
    """What build_draft_config takes: fields as attributes and by `in`."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def model_args(*, markov_head_type: str, confidence_head_with_markov: bool) -> _ModelArgs:
    """As a DeepSpec config file gives them, with every head switched on."""
    return _ModelArgs(
        num_draft_layers=3,
        target_layer_ids=TARGET_LAYER_IDS,
        block_size=NUM_SLOTS,
        mask_token_id=MASK_TOKEN_ID,
        num_anchors=4,
        confidence_head_alpha=1.0,
        confidence_head_with_markov=confidence_head_with_markov,
        markov_rank=MARKOV_RANK,
        markov_head_type=markov_head_type,
    )


def gemma4_case(name: str, *, seed: int, markov_head_type: str, confidence_head_with_markov: bool = True) -> Case:
    """A Gemma4DSparkModel, its config copied from the target's: K=V full layers, partial rotation, soft-cap."""
    target_config = Gemma4Config(text_config=gemma4_text_config(INTERMEDIATE_SIZE).to_dict())
    args = model_args(markov_head_type=markov_head_type, confidence_head_with_markov=confidence_head_with_markov)
    return _case(name, Gemma4DSparkModel, gemma4_draft_config(target_config, args), seed=seed)


def qwen3_case(name: str, *, seed: int) -> Case:
    """A Qwen3DSparkModel with the vanilla head. It embeds without a scale and caps nothing."""
    fields = {**QWEN3_FIELDS, "num_hidden_layers": NUM_TARGET_LAYERS, "layer_types": ["full_attention"] * 6}
    args = model_args(markov_head_type="vanilla", confidence_head_with_markov=True)
    config = qwen3_draft_config(Qwen3Config(**{**fields, "use_sliding_window": False, "sliding_window": None}), args)
    return _case(name, Qwen3DSparkModel, config, seed=seed)


def _case(name: str, model_class: type[nn.Module], config: PretrainedConfig, *, seed: int) -> Case:
    generator = generator_of(seed)
    config._attn_implementation = "sdpa"
    model = model_class(config).eval()
    fill(model, generator)
    taps = drawn(generator, NUM_ROWS, len(TARGET_LAYER_IDS) * HIDDEN_SIZE, scale=2.0)
    blocks = [
        _block(model, taps, anchor=anchor, position=position)
        for anchor, position in zip(ANCHOR_TOKEN_IDS, ANCHOR_POSITIONS, strict=True)
    ]
    return Case(
        name=name,
        original=ORIGINAL,
        how="eval/dspark/draft_ops.py: forward_dspark_draft_block with an empty cache and the whole context, then "
        "compute_logits, sample_draft_tokens at temperature 0 and the sigmoid of predict_confidence_step",
        deviations=["taps are random numbers"],
        seed=seed,
        save=model.save_pretrained,
        golden={**anchors(), "taps": taps, **stacked(blocks)},
    )


@torch.no_grad()
def _block(model: nn.Module, taps: Tensor, *, anchor: int, position: int) -> dict[str, Tensor]:
    ids = block_ids(anchor, NUM_SLOTS)
    hidden = forward_dspark_draft_block(
        model,
        draft_input_ids=ids,
        position_ids=torch.arange(position + NUM_SLOTS)[None],
        past_key_values_draft=DynamicCache(),
        target_hidden_states=taps[None, :position],
        start=position,
        block_size=NUM_SLOTS,
    )
    base = model.compute_logits(hidden)
    drafts, logits = model.sample_draft_tokens(base, first_prev_token_ids=ids[:, 0], hidden_states=hidden)
    previous = torch.cat([ids[:, :1], drafts[:, :-1]], dim=1)
    confidences = model.predict_confidence_step(hidden, prev_token_ids=previous).sigmoid()
    return {
        "base_logits": base[0],
        "previous_token_ids": previous[0],
        "logits": logits[0],
        "greedy_drafts": drafts[0],
        "confidences": confidences.reshape(-1),
    }
