"""Drafters of the speculators library (PyPI `speculators`): reduced vocabularies, unscaled embeddings."""

from __future__ import annotations

from typing import Any

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import Qwen3Config

from drafter_originals.case import (
    ANCHOR_POSITIONS,
    ANCHOR_TOKEN_IDS,
    DRAFT_VOCAB_SIZE,
    HIDDEN_SIZE,
    MARKOV_RANK,
    MASK_TOKEN_ID,
    NUM_ROWS,
    QWEN3_FIELDS,
    TARGET_LAYER_IDS,
    VOCAB_SIZE,
    Case,
    anchors,
    drawn,
    fill,
    generator_of,
    stacked,
    walk,
)

ORIGINAL = "speculators 0.9.0 (PyPI), models/dflash and models/dspark"
NUM_SLOTS = 6
HOW = (
    "_backbone_forward over the whole text, its anchors chosen by loss_mask, with torch's scaled_dot_product_attention"
)
DEVIATIONS = ["taps are random numbers"]


def config_fields(algorithm: str, *, sliding_window_non_causal: bool, num_drafts: int) -> dict[str, Any]:
    """What both config classes take. Ids count a layer more than z-lab's: id l is the input of layer l."""
    layer_config = Qwen3Config(**QWEN3_FIELDS)
    layer_config._attn_implementation = "sdpa"
    return {
        "transformer_layer_config": layer_config,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "block_size": NUM_SLOTS,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in TARGET_LAYER_IDS],
        "mask_token_id": MASK_TOKEN_ID,
        "sliding_window_non_causal": sliding_window_non_causal,
        "speculators_config": SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_drafts)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Gemma4ForConditionalGeneration"]),
        ),
    }


def random_vocabulary(model: DFlashDraftModel, generator: torch.Generator) -> None:
    """Let the drafter know a random choice of the target's tokens, in rising order."""
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB_SIZE].sort().values
    t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    t2d[ids] = True
    model.load_vocab_mappings(t2d, ids - torch.arange(DRAFT_VOCAB_SIZE))


@torch.no_grad()
def hidden_and_logits(model: DFlashDraftModel, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Normed hidden states [A, NUM_SLOTS, N] and base logits [A, NUM_SLOTS, Vd] of every block, in one pass."""
    num_rows = NUM_ROWS + NUM_SLOTS + 1  # an anchor must have its block, and a token after it, in the text
    token_ids = torch.full((1, num_rows), MASK_TOKEN_ID)
    token_ids[0, ANCHOR_POSITIONS] = torch.tensor(ANCHOR_TOKEN_IDS)
    loss_mask = torch.zeros(1, num_rows)
    loss_mask[0, ANCHOR_POSITIONS] = 1.0
    padded = torch.cat([taps, taps.new_zeros(num_rows - NUM_ROWS, taps.shape[1])])
    hidden, logits, *_ = model._backbone_forward(
        padded[None],
        token_ids,
        loss_mask,
        torch.zeros(1, num_rows, HIDDEN_SIZE),
        torch.zeros(1, num_rows, dtype=torch.long),
        max_anchors=len(ANCHOR_POSITIONS),
    )
    shape = (len(ANCHOR_POSITIONS), NUM_SLOTS, -1)
    return hidden.view(shape), logits.view(shape)


def dflash_case(name: str, *, seed: int, sliding_window_non_causal: bool) -> Case:
    """Slot 0 holds the anchor and predicts nothing."""
    generator = generator_of(seed)
    fields = config_fields("dflash", sliding_window_non_causal=sliding_window_non_causal, num_drafts=NUM_SLOTS - 1)
    model = DFlashDraftModel(DFlashSpeculatorConfig(**fields)).eval()
    fill(model, generator)
    random_vocabulary(model, generator)
    taps = drawn(generator, NUM_ROWS, len(TARGET_LAYER_IDS) * HIDDEN_SIZE, scale=2.0)
    _, logits = hidden_and_logits(model, taps)
    return Case(
        name=name,
        original=ORIGINAL,
        how=HOW,
        deviations=DEVIATIONS,
        seed=seed,
        save=model.save_pretrained,
        golden={
            **anchors(),
            "taps": taps,
            "embed_tokens": model.embed_tokens.weight.detach(),
            "base_logits": logits[:, 1:],
        },
    )


def dspark_case(name: str, *, seed: int) -> Case:
    """Every slot predicts the next token; a vanilla Markov head and a confidence head."""
    generator = generator_of(seed)
    fields = config_fields("dspark", sliding_window_non_causal=False, num_drafts=NUM_SLOTS)
    model = DSparkDraftModel(DSparkSpeculatorConfig(**fields, markov_rank=MARKOV_RANK)).eval()
    fill(model, generator)
    random_vocabulary(model, generator)
    taps = drawn(generator, NUM_ROWS, len(TARGET_LAYER_IDS) * HIDDEN_SIZE, scale=2.0)
    hidden, logits = hidden_and_logits(model, taps)
    blocks = [_corrected_block(model, hidden[i], logits[i], anchor=anchor) for i, anchor in enumerate(ANCHOR_TOKEN_IDS)]
    return Case(
        name=name,
        original=ORIGINAL,
        how=f"{HOW}; then markov_head.block_bias over greedy drafts and the sigmoid of confidence_head",
        deviations=DEVIATIONS,
        seed=seed,
        save=model.save_pretrained,
        golden={
            **anchors(),
            "taps": taps,
            "embed_tokens": model.embed_tokens.weight.detach(),
            **stacked(blocks),
        },
    )


@torch.no_grad()
def _corrected_block(model: DSparkDraftModel, hidden: Tensor, base: Tensor, *, anchor: int) -> dict[str, Tensor]:
    def corrected(previous: Tensor) -> Tensor:
        return base + model.markov_head.block_bias(prev_token_ids=previous[None], hidden_states=hidden[None])[0]

    previous, logits, drafts = walk(base, corrected, anchor=anchor, target_ids=lambda ids: ids + model.d2t[ids])
    features = torch.cat([hidden, model.markov_head.prev_embeddings(previous)], dim=-1)
    return {
        "base_logits": base,
        "previous_token_ids": previous,
        "logits": logits,
        "greedy_drafts": drafts,
        "confidences": model.confidence_head(features).sigmoid(),
    }
