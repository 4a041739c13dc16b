"""T-018: rounds that verify no draft still give the drafter its context, and verify no draft left from before.

Seen red: run_cycle committing only where it drafted.
"""

from __future__ import annotations

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine import engine as engine_module
from outrider.engine.batch import CycleBatch
from outrider.engine.proposer import DFlashProposer
from outrider.engine.rejection import DraftBlock, point_mass_block
from outrider.models.attention import LayerCaches
from tests.cases.common import fresh_caches, text_rows, text_taps
from tests.scripted import make_test_engine
from tests.toy import TAP_LAYERS, reference_greedy, toy_drafter, toy_target

TARGET = toy_target()
PROMPT = [5, 17, 80, 3, 44, 9]
LENGTHS = [3, 3, 0, 0, 0, 3, 0, 2]
ACCEPTED = [3, 0, 0, 0, 0, 2, 0, 1]  # most of each round
NUM_TOKENS = 1 + sum(ACCEPTED) + len(LENGTHS)
ANSWER = reference_greedy(TARGET, PROMPT, NUM_TOKENS)


class WatchedProposer(DFlashProposer):
    """Its context is checked before each proposal; what it proposes follows the script."""

    num_checked = num_rounds = 0

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        text, anchor = PROMPT + ANSWER, batch.host_positions[0]
        rebuilt = fresh_caches(self.drafter.config.layers)
        rows = text_rows(text[:anchor])
        self.drafter.write_context(text_taps(TARGET, text[:anchor], TAP_LAYERS), rows.seats, rows.positions, rebuilt)
        for own, other in zip(self.caches, rebuilt, strict=True):
            for mine, theirs in zip(own[:2], other[:2], strict=True):
                torch.testing.assert_close(mine[0, :anchor], theirs[0, :anchor], rtol=0, atol=1e-10)
        self.num_checked += 1
        drafts = text[anchor + 1 : anchor + 1 + draft_length]
        num_right = ACCEPTED[self.num_rounds]
        if num_right < draft_length:
            drafts[num_right] = (drafts[num_right] + 1) % 96
        return point_mass_block(torch.tensor([drafts]), torch.float64)


def test_t018_context_has_no_holes_and_no_draft_is_a_phantom(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = toy_drafter(TARGET)
    proposer = WatchedProposer(drafter, LayerCaches(fresh_caches(drafter.config.layers)))
    monkeypatch.setattr(
        engine_module, "plan_draft_lengths", lambda limits, **_: [LENGTHS[proposer.num_rounds]] * len(limits)
    )
    engine = make_test_engine(TARGET, proposer, max_seats=1)
    request = engine.add(PROMPT, SamplingParams(max_tokens=NUM_TOKENS))
    engine.step()
    for length, accepted in zip(LENGTHS, ACCEPTED, strict=True):
        num_drafted, num_tokens = request.acceptance.num_draft_tokens, len(request.output_token_ids)
        engine.step()
        assert len(request.output_token_ids) - num_tokens == accepted + 1
        assert request.acceptance.num_draft_tokens - num_drafted == length
        proposer.num_rounds += 1
    assert (request.output_token_ids, request.finish_reason) == (ANSWER, "length")
    assert proposer.num_checked == sum(length > 0 for length in LENGTHS)
