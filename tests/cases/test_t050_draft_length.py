"""T-050: a block of B slots drafts 1 .. B-1 tokens, B-1 unless told otherwise; more is refused, 0 drafts nothing.

Seen red: max_draft_length returning block_size; Engine without its check.
"""

from __future__ import annotations

import pytest

from outrider.core import SamplingParams
from outrider.errors import ConfigError, RequestError
from tests.cases.common import one_request, text_rows, text_taps, toy_proposer
from tests.scripted import make_test_engine
from tests.toy import TAP_LAYERS, reference_greedy, toy_drafter, toy_target

PROMPT = [5, 17, 80, 3, 44, 9]
NUM_TOKENS = 12
TARGET = toy_target()
EXPECTED = reference_greedy(TARGET, PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize("asked", [0, 1, 2, 3, 4, None])
def test_t050_lengths_that_fit(asked: int | None, by_request: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, lengths = toy_proposer(toy_drafter(TARGET)), []
    propose = proposer.propose
    monkeypatch.setattr(proposer, "propose", lambda batch, k: lengths.append(k) or propose(batch, k))
    engine = make_test_engine(TARGET, proposer, max_seats=1, num_speculative_tokens=None if by_request else asked)
    request = engine.add(
        PROMPT, SamplingParams(max_tokens=NUM_TOKENS, num_speculative_tokens=asked if by_request else None)
    )
    while engine.has_work:
        engine.step()
    assert request.output_token_ids == EXPECTED
    assert max(lengths, default=0) == (4 if asked is None else asked)
    assert (request.acceptance.num_draft_tokens == 0) == (asked == 0)


@pytest.mark.parametrize("asked", [5, 6, 17])
def test_t050_lengths_that_do_not_fit(asked: int) -> None:
    proposer = toy_proposer(toy_drafter(TARGET))
    with pytest.raises(ConfigError, match=f"num_speculative_tokens={asked}.*toy-drafter drafts at most 4"):
        make_test_engine(TARGET, proposer, num_speculative_tokens=asked)
    engine = make_test_engine(TARGET, proposer)
    with pytest.raises(RequestError, match=f"num_speculative_tokens={asked}.*toy-drafter drafts at most 4"):
        engine.add(PROMPT, SamplingParams(num_speculative_tokens=asked))
    assert not engine.has_work


@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_t050_default_is_the_whole_block(block_size: int) -> None:
    proposer = toy_proposer(toy_drafter(TARGET, block_size=block_size))
    assert proposer.default_draft_length == proposer.max_draft_length == block_size - 1


def test_t050_shorter_drafts_begin_alike_in_a_causal_block() -> None:
    """In a block without causality every slot sees all others, so that fewer slots may draft differently."""
    proposer = toy_proposer(toy_drafter(TARGET, is_causal=True))
    rows = text_rows(PROMPT)
    proposer.commit(text_taps(TARGET, PROMPT, TAP_LAYERS), rows.seats, rows.positions)
    long, short = (proposer.propose(one_request(EXPECTED[0], len(PROMPT), k), k).token_ids for k in (4, 2))
    assert long[:, :2].tolist() == short.tolist()
