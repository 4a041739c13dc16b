"""T-028: nothing after the first end token of a block is emitted, counted or streamed.

Seen red: RequestState.append looking for stops at the last token only.
"""

from __future__ import annotations

import pytest

from outrider.core import Chunk, SamplingParams
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import reference_greedy, toy_target

PROMPT = [5, 17, 80, 3]
NUM_TOKENS = 30
TARGET = toy_target()
ANSWER = reference_greedy(TARGET, PROMPT, NUM_TOKENS)


def run(eos: int, *, drafts: bool = True, ignore_eos: bool = False) -> tuple[list[int], list[Chunk]]:
    """Ids of the finished request, and everything that was streamed."""
    proposer = ScriptedProposer([PROMPT + ANSWER]) if drafts else None
    engine = make_test_engine(TARGET, proposer, end_token_ids=[eos], max_seats=1)
    request = engine.add(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=ignore_eos))
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    assert request.finish_reason == chunks[-1].finish_reason
    return request.output_token_ids, chunks


@pytest.mark.parametrize("index", range(NUM_TOKENS))
def test_t028_output_ends_at_the_first_end_token(index: int) -> None:
    eos = ANSWER[index]
    expected = ANSWER[: ANSWER.index(eos) + 1]
    token_ids, chunks = run(eos)
    assert token_ids == expected
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected
    assert all(chunk.num_accepted_draft_tokens <= len(chunk.token_ids) for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@pytest.mark.parametrize("index", [0, 3, 17, 29])
def test_t028_plain_decoding_agrees(index: int) -> None:
    assert run(ANSWER[index], drafts=False)[0] == run(ANSWER[index])[0]


@pytest.mark.parametrize("index", [0, 7, 29])
def test_t028_ignore_eos(index: int) -> None:
    token_ids, chunks = run(ANSWER[index], ignore_eos=True)
    assert token_ids == ANSWER
    assert chunks[-1].finish_reason == "length"
