"""T-032: an end token that was only drafted ends nothing.

Seen red: Engine._emit ending a request whose draft holds an end token.
"""

from __future__ import annotations

import pytest

from outrider.core import SamplingParams
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import reference_greedy, toy_target

TARGET = toy_target()
PROMPTS = [[5, 17, 80, 3], [9, 61, 2]]
NUM_TOKENS = 16
ANSWERS = [reference_greedy(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]
EOS = next(i for i in range(96) if i not in ANSWERS[0] + ANSWERS[1])


class EosProposer(ScriptedProposer):
    """Right drafts for seat 1; for seat 0 an end token in every round's slot `index`, with a right draft after it."""

    index = 0

    def _drafts(self, seat: int, anchor_position: int, draft_length: int, num_right: int) -> list[int]:
        drafts = super()._drafts(seat, anchor_position, draft_length, draft_length)
        if seat == 0 and self.index < draft_length:
            drafts[self.index] = EOS
        return drafts


@pytest.mark.parametrize("index", range(4))
def test_t032_only_verified_tokens_end_a_request(index: int) -> None:
    proposer = EosProposer([prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)])
    proposer.index = index
    engine = make_test_engine(TARGET, proposer, end_token_ids=[EOS], max_seats=2)
    request, mate = (engine.add(prompt, SamplingParams(max_tokens=NUM_TOKENS)) for prompt in PROMPTS)
    for num_rounds in range(3):  # both prompts, then an end token proposed in two rounds running
        engine.step()
        assert request.finish_reason is None
        assert engine.scheduler.running[0] is request
        assert len(proposer.asked) == num_rounds
    while engine.has_work:
        engine.step()
    assert [request.output_token_ids, mate.output_token_ids] == ANSWERS
    assert [request.finish_reason, mate.finish_reason] == ["length", "length"]
    assert request.acceptance.accepted_histogram[index] >= 2
