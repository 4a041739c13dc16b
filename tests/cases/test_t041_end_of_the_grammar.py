"""T-041: after the grammar's end no mask is asked for, drafts behind the end are dropped, and the request stops.

Seen red: a mask asked for in every row (xgrammar raises).
"""

from __future__ import annotations

import pytest

from outrider.core import SamplingParams
from tests.byte_tokenizer import EOS
from tests.cases.constrained import GRAMMAR, TEXT, make_engine, run

LEGAL = list(TEXT.encode())
JUNK = [ord("j"), ord("k")]


@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_t041_the_end_at_every_draft_and_as_bonus(draft_length: int, temperature: float, acceptance: str) -> None:
    """The end falls on another slot for every draft length and every place of the junk; 240 runs."""
    for seed in range(5):
        params = SamplingParams(
            grammar=GRAMMAR,
            temperature=temperature,
            seed=seed if acceptance == "block" else None,
            num_speculative_tokens=draft_length,
        )
        for drafts in ([*LEGAL, EOS, *JUNK], [*LEGAL, *JUNK], [*LEGAL[:seed], *JUNK, *LEGAL[seed + 2 :], EOS]):
            request = run(make_engine(drafts, acceptance=acceptance, seed=seed), params)
            assert request.finish_reason == "stop"
            assert request.text.endswith("}")
            assert request.output_token_ids[-1] == EOS
            assert len(request.output_token_ids) == len(LEGAL) + 1


def test_t041_drafts_after_the_end_are_not_counted_as_text() -> None:
    request = run(make_engine([*LEGAL, EOS, *JUNK]), SamplingParams(grammar=GRAMMAR))
    assert bytes(request.output_token_ids[:-1]).decode() == request.text == TEXT


def test_t041_min_tokens_cannot_hold_the_end_back() -> None:
    for drafts in (None, [*LEGAL, EOS]):
        request = run(make_engine(drafts), SamplingParams(grammar=GRAMMAR, min_tokens=20, max_tokens=30))
        assert (request.text, request.finish_reason) == (TEXT, "stop")
