"""T-040: the grammar is moved by tokens that became text, and every row is masked for the drafts before it.

Seen red: drafts not taken back; rows masked for the text before the block; emitted tokens not advanced over; rows not
masked at all.
"""

from __future__ import annotations

import pytest

from outrider.core import SamplingParams
from outrider.engine.state import RequestState
from tests.cases.constrained import GRAMMAR, TEXT, fresh_constraint, make_engine, make_target, run, same_state

LEGAL = list(TEXT.encode())
PARAMS = {
    "greedy": SamplingParams(grammar=GRAMMAR),
    "seeded": SamplingParams(grammar=GRAMMAR, temperature=2.0, seed=3),
    "penalised": SamplingParams(grammar=GRAMMAR, frequency_penalty=1.0, logit_bias={ord("7"): -5.0}),
}


def spoiled(index: int, token_id: int) -> list[int]:
    return [*LEGAL[:index], token_id, *LEGAL[index + 1 :]]


DRAFTS = {
    "all-legal": LEGAL,
    **{f"illegal-{index}": spoiled(index, ord("x")) for index in range(len(LEGAL))},
    **{f"end-too-early-{index}": spoiled(index, 257) for index in range(len(LEGAL))},
    "outside-the-tokenizer": spoiled(2, 263),
    "legal-but-rejected": spoiled(5, ord("3")),
    "nothing-legal": [ord("`")] * 8,
}


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_t040_text_equals_plain_decoding(
    params: SamplingParams, drafts: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    def check(request: RequestState) -> None:
        assert request.constraint is not None
        assert same_state(request.constraint, fresh_constraint(request.output_token_ids))

    plain = run(make_engine(), params)
    drafted = run(make_engine(drafts), params, check)
    assert drafted.output_token_ids == plain.output_token_ids
    assert (drafted.text, drafted.finish_reason) == (plain.text, "stop")
    assert drafted.text[:5] + drafted.text[6:] == '{"a":}'
    assert capfd.readouterr() == ("", "")


def test_t040_legal_drafts_pay() -> None:
    drafted = run(make_engine(LEGAL), PARAMS["greedy"])
    assert drafted.text == TEXT
    assert drafted.acceptance.num_accepted_tokens == len(LEGAL) - 2  # the first token is the prompt's, one a bonus


def test_t040_beside_requests_without_a_grammar() -> None:
    engine = make_engine(LEGAL, max_seats=4)
    params = (PARAMS["greedy"], SamplingParams(max_tokens=7), PARAMS["seeded"])
    requests = [engine.add([256], each) for each in params]
    while engine.has_work:
        engine.step()
    assert [request.text for request in requests] == [run(make_engine(), each).text for each in params]
    assert requests[1].text == "`" * 7


def test_t040_the_target_would_write_something_else() -> None:
    assert run(make_engine(target=make_target()), SamplingParams(max_tokens=3)).text == "```"
