"""T-021: drafts and the newest token are embedded from their ids, whatever rows the prompt brought.

Seen red: verify rows that carry the prompt's given rows; the mask multiplied instead of chosen by (NaN); every chunk of
the prompt given the first rows of the buffer.
"""

from __future__ import annotations

import pytest

from outrider.core import SamplingParams
from tests.cases.mixed import finish_rows, mixed_prompt
from tests.scripted import ScriptedProposer, make_test_engine, run_requests
from tests.toy import reference_greedy, toy_target

PROMPT = mixed_prompt([5, 17, 80], 4, [44, 9])
NUM_TOKENS = 17  # prefill gives the first, then four cycles of three drafts and one
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)


@pytest.mark.parametrize("settings", [{}, {"prefill_rows": 5}, {"rows_per_pass": 16}], ids=str)
@pytest.mark.parametrize("script", [(), (0, 3, 1)], ids=["full", "mixed"])
def test_t021_ids_are_embedded_from_the_table(settings: dict[str, int], script: tuple[int, ...]) -> None:
    target = toy_target()
    token_ids = PROMPT.token_ids.tolist()
    expected = reference_greedy(target, token_ids, NUM_TOKENS, PROMPT.given)
    proposer = ScriptedProposer([token_ids + expected], max_draft_length=3, script=script)
    engine = make_test_engine(target, proposer, max_seats=1, **settings)
    request = finish_rows(engine, PROMPT, GREEDY)
    assert request.finish_reason == "length"  # "error" where a NaN was read
    assert request.output_token_ids == expected
    if not script:
        assert request.acceptance.num_accepted_tokens == request.acceptance.num_draft_tokens == 12


def test_t021_the_next_request_of_the_seat_is_text() -> None:
    target, text = toy_target(), [7, 3, 90, 90, 12]
    engine = make_test_engine(target, max_seats=1)
    finish_rows(engine, PROMPT, GREEDY)
    assert run_requests(engine, (text, GREEDY)) == [reference_greedy(target, text, NUM_TOKENS)]


def test_t021_mixed_and_text_prompts_run_side_by_side() -> None:
    target, text = toy_target(), [7, 3, 12]
    token_ids = PROMPT.token_ids.tolist()
    answers = [
        reference_greedy(target, token_ids, NUM_TOKENS, PROMPT.given),
        reference_greedy(target, text, NUM_TOKENS),
    ]
    proposer = ScriptedProposer([token_ids + answers[0], text + answers[1]], max_draft_length=3, script=(3, 1, 0, 2))
    engine = make_test_engine(target, proposer)
    requests = [engine.add_rows(PROMPT, GREEDY), engine.add(text, GREEDY)]
    while engine.has_work:
        engine.step()
    assert [request.output_token_ids for request in requests] == answers
