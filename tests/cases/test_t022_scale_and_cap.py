"""T-022: the drafter's embedding scale, output multiplier and soft-cap are applied once each, as its config says.

Seen red: each of the mutants below, and `best` taken for proof (the cap keeps the order).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.proposer import candidate_probs
from outrider.kernels.reference import soft_cap
from outrider.models.dflash import DFlashDrafter
from outrider.models.draft_layers import BlockRows
from tests.cases.common import fresh_caches, text_taps
from tests.toy import (
    MASK_TOKEN_ID,
    SOURCE,
    TAP_LAYERS,
    block_logits,
    toy_drafter_config,
    toy_drafter_tensors,
    toy_target,
)

TARGET = toy_target()
TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32]
BLOCK = BlockRows(torch.tensor([12, *[MASK_TOKEN_ID] * 4]), torch.tensor([0]), torch.tensor([len(TEXT)]), 5)
DECLARED = {"embedding_scale": None, "output_multiplier": 1.5, "final_logit_softcapping": 5.0}


def drafter(**changes: float | None) -> DFlashDrafter:
    config = replace(toy_drafter_config(), **changes)  # type: ignore[arg-type]
    tensors = toy_drafter_tensors(config)
    return DFlashDrafter(config, tensors, TARGET, kernels=TARGET.kernels, context_length=64, source=SOURCE)


def logits(drafter: DFlashDrafter) -> Tensor:
    caches = fresh_caches(drafter.config.layers)
    positions = torch.arange(len(TEXT))
    drafter.write_context(text_taps(TARGET, TEXT, TAP_LAYERS), positions * 0, positions, caches)
    return block_logits(drafter, BLOCK, caches)


def written_out() -> Tensor:
    """The block's embeddings scaled by sqrt(32) by hand, through a drafter that scales and caps nothing."""
    plain = drafter(embedding_scale=1.0)
    plain.embedding = plain.embedding * 32**0.5
    return 5.0 * torch.tanh(1.5 * logits(plain) / 5.0)


def test_t022_logits_are_the_written_out_ones() -> None:
    torch.testing.assert_close(logits(drafter(**DECLARED)), written_out(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "mutant",
    [
        {"embedding_scale": 1.0},
        {"embedding_scale": 32.0},
        {"output_multiplier": 1.0},
        {"final_logit_softcapping": None},
    ],
    ids=["no scale", "double scale", "no multiplier", "no cap"],
)
def test_t022_a_mutant_shows(mutant: dict[str, float | None]) -> None:
    assert not torch.allclose(logits(drafter(**{**DECLARED, **mutant})), written_out(), atol=1e-4)


@pytest.mark.parametrize("slot", [0, 2])
def test_t022_anchor_and_mask_are_both_scaled(slot: int) -> None:
    """Leaving out the scale of one row alone shows as well."""
    plain = drafter(embedding_scale=1.0, output_multiplier=1.5, final_logit_softcapping=5.0)
    token = int(BLOCK.token_ids[slot])
    spared = plain.embedding * 32**0.5
    spared[token] = plain.embedding[token]
    plain.embedding = spared
    assert not torch.allclose(logits(plain), written_out(), atol=1e-4)


def test_t022_the_cap_comes_before_the_temperature() -> None:
    capped = soft_cap(torch.tensor([12.0, 9.0, 3.0]), 5.0)
    expected = torch.tensor([0.516, 0.429, 0.055])
    found = candidate_probs(capped, SamplingParams(temperature=1.0))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    hot = candidate_probs(capped, SamplingParams(temperature=2.0))
    wrong = soft_cap(torch.tensor([12.0, 9.0, 3.0]) / 2.0, 5.0).softmax(-1)
    torch.testing.assert_close(hot, (capped / 2.0).softmax(-1))
    assert not torch.allclose(hot, wrong, atol=1e-4)


def test_t022_the_cap_does_not_show_in_the_argmax() -> None:
    """Why logits are compared, and not drafts."""
    both = [logits(drafter(**{**DECLARED, "final_logit_softcapping": cap})).argmax(dim=-1) for cap in (5.0, None)]
    assert torch.equal(*both)
