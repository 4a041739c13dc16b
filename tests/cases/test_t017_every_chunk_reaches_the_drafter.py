"""T-017: after prefill the drafter's context has one row a prompt token, whatever the chunks were.

Seen red: prefill_chunk committing taps only where a chunk is the prompt's last.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine import engine as engine_module
from tests.cases.common import toy_proposer
from tests.scripted import make_test_engine
from tests.toy import block_logits, toy_drafter, toy_target

TARGET = toy_target()
PROMPT = [(11 * i + 5) % 95 for i in range(23)]


def after_prefill(chunk_size: int) -> tuple[list[Tensor], Tensor]:
    """Keys and values of the drafter's context [slots, G, D] by layer, and the logits of its first block."""
    proposer = toy_proposer(toy_drafter(TARGET))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine_module,
            "num_chunk_rows",
            lambda request, _: min(chunk_size, len(PROMPT) - request.num_computed_tokens),
        )
        engine = make_test_engine(TARGET, proposer, max_seats=1)
        request = engine.add(PROMPT, SamplingParams(max_tokens=4))
        while not request.output_token_ids:
            engine.step()
    anchor, seat = torch.tensor(request.output_token_ids), torch.tensor([0])
    block = proposer.drafter.block(anchor, seat, torch.tensor([len(PROMPT)]), num_drafts=4)
    logits = block_logits(proposer.drafter, block, proposer.caches)
    return [each.flatten(0, 1) for cache in proposer.caches for each in (cache.keys, cache.values)], logits


@pytest.mark.parametrize("chunk_size", [8, 7, 5, 1])
def test_t017_context_and_proposals_do_not_depend_on_chunks(chunk_size: int) -> None:
    whole, whole_logits = after_prefill(len(PROMPT))
    pieces, logits = after_prefill(chunk_size)
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)
    torch.testing.assert_close(logits, whole_logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk_size", [23, 7])
def test_t017_a_row_for_each_prompt_token(chunk_size: int) -> None:
    for each in after_prefill(chunk_size)[0]:
        assert [bool(row.any()) for row in each] == [True] * 23 + [False] * (len(each) - 23)
