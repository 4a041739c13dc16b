"""z-lab's DFlash (PyPI `dflash`, model.py), alone and under DeepSpec's Markov head (the hybrid)."""

from __future__ import annotations

from typing import Any

import torch
from dflash.model import DFlashDraftModel, _output_head, _raw_input_embeddings, extract_context_feature
from torch import Tensor, nn
from transformers import Gemma4ForCausalLM, Qwen3Config

from drafter_originals.case import (
    ANCHOR_POSITIONS,
    ANCHOR_TOKEN_IDS,
    HIDDEN_SIZE,
    MARKOV_RANK,
    MASK_TOKEN_ID,
    NUM_ROWS,
    NUM_TARGET_LAYERS,
    QWEN3_FIELDS,
    SOFTCAP,
    TARGET_LAYER_IDS,
    VOCAB_SIZE,
    Case,
    anchors,
    block_ids,
    drawn,
    fill,
    gemma4_text_config,
    generator_of,
    stacked,
    walk,
)

ORIGINAL = "dflash 0.1.0 (PyPI, z-lab), model.py"
NUM_SLOTS = 8
SCALE = HIDDEN_SIZE**0.5  # dflash 0.1.0 scales by what the config says; earlier ones called Gemma's scaled embedding
SCALE_DEVIATION = (
    "dflash 0.1.0 multiplies raw embeddings by input_embedding_scale, 1 where the config lacks it; Gemma's drafters "
    "were trained behind the target's scaled embedding, so the config declares sqrt(hidden_size)"
)


def tiny_target(generator: torch.Generator) -> Gemma4ForCausalLM:
    """A Gemma 4 text model of six layers that the drafters of this file read."""
    config = gemma4_text_config(intermediate_size=24)
    target = Gemma4ForCausalLM(config).eval()
    fill(target, generator)
    return target


def drafter_model(generator: torch.Generator, *, is_causal: bool | None, **more: Any) -> DFlashDraftModel:
    """The original with random weights; `more` are config fields."""
    fields = {
        **QWEN3_FIELDS,
        "architectures": ["DFlashDraftModel"],
        "block_size": NUM_SLOTS,
        "num_target_layers": NUM_TARGET_LAYERS,
        "final_logit_softcapping": SOFTCAP,
        "dflash_config": {
            "mask_token_id": MASK_TOKEN_ID,
            "target_layer_ids": TARGET_LAYER_IDS,
            "input_embedding_scale": SCALE,
        },
        **more,
    }
    if is_causal is not None:
        fields["is_causal"] = is_causal
    model = DFlashDraftModel(Qwen3Config(**fields)).eval()
    fill(model, generator)
    return model


@torch.no_grad()
def hidden_of_slots(model: DFlashDraftModel, target: nn.Module, taps: Tensor, *, anchor: int, position: int) -> Tensor:
    """Normed hidden states [NUM_SLOTS - 1, N] of the slots that draft, as dflash_generate slices them."""
    hidden = model(
        target_hidden=taps[None, :position],
        noise_embedding=_raw_input_embeddings(target, block_ids(anchor, NUM_SLOTS), SCALE),
        position_ids=torch.arange(position + NUM_SLOTS)[None],
    )
    return hidden[0, 1 - NUM_SLOTS :]


def zlab_case(name: str, *, seed: int, is_causal: bool | None) -> Case:
    """z-lab's drafter on a target of transformers; the target is stored where causality is declared (one is enough)."""
    generator = generator_of(seed)
    target = tiny_target(generator)
    model = drafter_model(generator, is_causal=is_causal)
    token_ids = torch.randint(5, VOCAB_SIZE, (NUM_ROWS,), generator=generator)
    with torch.no_grad():
        outputs = target(token_ids[None], output_hidden_states=True)
    taps = extract_context_feature(outputs.hidden_states, TARGET_LAYER_IDS)[0]
    blocks = [
        model.compute_logits(
            hidden_of_slots(model, target, taps, anchor=anchor, position=position), _output_head(target)
        ).detach()
        for anchor, position in zip(ANCHOR_TOKEN_IDS, ANCHOR_POSITIONS, strict=True)
    ]
    return Case(
        name=name,
        original=ORIGINAL,
        how="DFlashDraftModel.forward without a cache, the whole context in one call; taps by extract_context_feature "
        "from a random Gemma4ForCausalLM of transformers; _raw_input_embeddings and compute_logits",
        deviations=[SCALE_DEVIATION],
        seed=seed,
        save=model.save_pretrained,
        golden={
            **anchors(),
            "token_ids": token_ids,
            "taps": taps,
            "embed_tokens": target.get_input_embeddings().weight.detach(),
            "base_logits": torch.stack(blocks),
        },
        facts={"layer_is_causal": [layer.self_attn.is_causal for layer in model.layers]},
        save_target=target.save_pretrained if is_causal is not None else None,
    )


def hybrid_case(name: str, *, seed: int) -> Case:
    """z-lab's backbone with the vanilla Markov head of DeepSpec on its drafting slots."""
    from deepspec.modeling.dspark.markov_head import VanillaMarkov

    generator = generator_of(seed)
    target = tiny_target(generator)
    head_fields = {"markov_rank": MARKOV_RANK, "markov_head_type": "vanilla"}
    model = drafter_model(generator, is_causal=None, **head_fields)
    model.markov_head = VanillaMarkov(vocab_size=VOCAB_SIZE, markov_rank=MARKOV_RANK)
    fill(model.markov_head, generator)
    taps = drawn(generator, NUM_ROWS, len(TARGET_LAYER_IDS) * HIDDEN_SIZE, scale=2.0)
    blocks = []
    for anchor, position in zip(ANCHOR_TOKEN_IDS, ANCHOR_POSITIONS, strict=True):
        hidden = hidden_of_slots(model, target, taps, anchor=anchor, position=position)
        base = model.compute_logits(hidden, _output_head(target)).detach()
        blocks.append(_corrected_block(model.markov_head, base, anchor=anchor))

    return Case(
        name=name,
        original=f"{ORIGINAL}; DeepSpec @afdfa7c9382a, markov_head.py",
        how="as zlab-dflash, then VanillaMarkov.apply_block_logits over greedy drafts",
        deviations=[
            SCALE_DEVIATION,
            "no original of the hybrid is published: z-lab's backbone and DeepSpec's head are composed, the head "
            "reading the token before each drafting slot, the anchor first",
            "taps are random numbers",
        ],
        seed=seed,
        save=model.save_pretrained,
        golden={
            **anchors(),
            "taps": taps,
            "embed_tokens": target.get_input_embeddings().weight.detach(),
            **stacked(blocks),
        },
    )


@torch.no_grad()
def _corrected_block(head: nn.Module, base: Tensor, *, anchor: int) -> dict[str, Tensor]:
    def corrected(previous: Tensor) -> Tensor:
        token_ids = previous[None, None]
        return head.apply_block_logits(base[None, None], token_ids=token_ids, hidden_states=None)[0, 0]

    previous, logits, drafts = walk(base, corrected, anchor=anchor)
    return {"base_logits": base, "previous_token_ids": previous, "logits": logits, "greedy_drafts": drafts}
