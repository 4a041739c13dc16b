"""T-030: a request ends with length at exactly the context limit, and no pass goes past it.

Seen red: next_draft_length without its limit (positions past the context); room one token too large.
"""

from __future__ import annotations

import pytest

from outrider.core import SamplingParams
from outrider.errors import RequestError
from outrider.models.attention import Rows
from tests.cases.common import toy_proposer
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import reference_greedy, toy_drafter, toy_target

LIMIT = 32
TARGET = toy_target(context_length=LIMIT)
LONG = [(11 * i + 5) % 95 for i in range(LIMIT)]
MATE = [(3 * i + 1) % 95 for i in range(10)]
MATE_ANSWER = reference_greedy(TARGET, MATE, 12)


@pytest.mark.parametrize("is_scripted", [True, False])
@pytest.mark.parametrize("length", range(26, LIMIT))
def test_t030_answers_fill_the_context(length: int, is_scripted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, highest = TARGET.forward, [0]

    def checked(rows: Rows, *args, **options):  # type: ignore[no-untyped-def]
        highest.append(int(rows.positions.max()))
        return forward(rows, *args, **options)

    monkeypatch.setattr(TARGET, "forward", checked)
    prompt, expected = LONG[:length], reference_greedy(TARGET, LONG[:length], LIMIT - length)
    for max_tokens in (None, 100):
        if is_scripted:
            proposer = ScriptedProposer([prompt + expected, MATE + MATE_ANSWER])
        else:
            proposer = toy_proposer(toy_drafter(TARGET, context_length=LIMIT), num_seats=2, context_length=LIMIT)
        engine = make_test_engine(TARGET, proposer, context_length=LIMIT, max_seats=2)
        request = engine.add(prompt, SamplingParams(max_tokens=max_tokens))
        mate = engine.add(MATE, SamplingParams(max_tokens=12))
        while engine.has_work:
            engine.step()
        assert (request.output_token_ids, request.finish_reason) == (expected, "length")
        assert mate.output_token_ids == MATE_ANSWER
    assert max(highest) < LIMIT


def test_t030_a_prompt_as_long_as_the_context_is_refused() -> None:
    engine = make_test_engine(TARGET, None, context_length=LIMIT)
    with pytest.raises(RequestError, match=r"32 tokens.*holds 32"):
        engine.add(LONG, SamplingParams())
    assert not engine.has_work
