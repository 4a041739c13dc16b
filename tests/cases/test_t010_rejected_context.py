"""T-010: after each round the drafter's context is that of prompt and accepted tokens, and nothing else is read.

Seen red: run_cycle committing one rejected row more, and one accepted row fewer; blocks that start one position late.
"""

from __future__ import annotations

import torch

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.proposer import DFlashProposer
from outrider.engine.rejection import DraftBlock
from outrider.models.draft_layers import BlockRows
from tests.cases.common import fresh_caches, text_taps, toy_proposer
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import MASK_TOKEN_ID, TAP_LAYERS, block_logits, reference_greedy, toy_drafter, toy_target

PROMPT = [5, 17, 80, 3, 44, 9]
NUM_TOKENS = 30
CONTEXT_LENGTH = 48  # no ring of the toy target wraps: slot p of every cache is position p


class ScriptedOverF2(ScriptedProposer):
    """The script decides acceptance, while a real drafter keeps its context and proposes unheard."""

    def __init__(self, text: list[int], inner: DFlashProposer) -> None:
        super().__init__([text], script=(4, 0, 2, 1, 3), tap_layers=TAP_LAYERS)
        self.inner = inner

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        assert int(self.inner.propose(batch, draft_length).token_ids.min()) >= 0
        return super().propose(batch, draft_length)

    def commit(self, taps: torch.Tensor, seats: torch.Tensor, positions: torch.Tensor) -> None:
        self.inner.commit(taps, seats, positions)
        super().commit(taps, seats, positions)


def test_t010_context_is_that_of_accepted_tokens() -> None:
    target = toy_target()
    drafter = toy_drafter(target)
    inner = toy_proposer(drafter, context_length=CONTEXT_LENGTH)
    expected = reference_greedy(target, PROMPT, NUM_TOKENS)
    proposer = ScriptedOverF2(PROMPT + expected, inner)
    engine = make_test_engine(target, proposer, max_seats=1, context_length=CONTEXT_LENGTH)
    request = engine.add(PROMPT, SamplingParams(max_tokens=NUM_TOKENS))
    while engine.has_work:
        engine.step()
        anchor = request.anchor_position
        for cache in (*engine.caches, *inner.caches):  # whoever reads what is not text is found out
            assert cache.keys.shape[1] == CONTEXT_LENGTH
            for each in cache[:2]:
                each[:, anchor:] = torch.nan
        text = PROMPT + request.output_token_ids
        rebuilt = fresh_caches(drafter.config.layers, context_length=CONTEXT_LENGTH)
        positions = torch.arange(anchor)
        drafter.write_context(text_taps(target, text[:-1], TAP_LAYERS), positions * 0, positions, rebuilt)
        for kept, fresh in zip(inner.caches, rebuilt, strict=True):
            for found, wanted in zip(kept[:2], fresh[:2], strict=True):
                torch.testing.assert_close(found[:, :anchor], wanted[:, :anchor], rtol=0, atol=1e-10)
        block = BlockRows(torch.tensor([text[-1], *[MASK_TOKEN_ID] * 4]), torch.tensor([0]), torch.tensor([anchor]), 5)
        torch.testing.assert_close(block_logits(drafter, block, inner.caches), block_logits(drafter, block, rebuilt))
        if proposer.asked and request.finish_reason is None:
            committed = [position for commit in proposer.commits for position in commit.positions]
            assert committed == list(range(anchor))
    assert request.output_token_ids == expected
    anchors = [asked.anchor_positions[0] for asked in proposer.asked]
    assert anchors[:6] == [6, 11, 12, 15, 17, 21]  # 5, 1, 3, 2 and 4 tokens later
