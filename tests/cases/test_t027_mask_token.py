"""T-027: the mask id is an ordinary id when the target emits it; output is cut by length, never by value.

Seen red: RequestState.append leaving out tokens equal to the mask id.
"""

from __future__ import annotations

import pytest
import torch

from outrider.core import SamplingParams
from tests.cases.common import TextTarget
from tests.scripted import FixedProposer, ScriptedProposer, make_test_engine, run_requests

MASK, EOS = 95, 1
ANSWER = [11, 12, MASK, 13, MASK, 14, EOS]
TEXTS = {"in the middle": [7, *ANSWER], "at the end": [7, 11, 12, 13, MASK, EOS], "twice": [7, 11, MASK, MASK, 12, EOS]}


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 6, None])
@pytest.mark.parametrize("name", TEXTS)
def test_t027_mask_ids_are_kept(name: str, max_tokens: int | None) -> None:
    text = TEXTS[name]
    expected = text[1:] if max_tokens is None else text[1 : 1 + max_tokens]
    proposers = [
        None,
        ScriptedProposer([text]),  # masks drafted where the target wants them
        ScriptedProposer([text], script=(0, 2, 1)),
        FixedProposer(choose=lambda batch, k: torch.full((len(batch.seats), k), MASK)),  # and where it does not
    ]
    for proposer in proposers:
        engine = make_test_engine(TextTarget(text, vocab_size=96), proposer, end_token_ids=[EOS], max_seats=1)
        assert run_requests(engine, ([7], SamplingParams(max_tokens=max_tokens))) == [expected]
