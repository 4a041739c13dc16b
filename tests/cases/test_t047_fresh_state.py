"""T-047: a seat's next request drafts, accepts and answers as on a new engine, whatever ended the one before.

Seen red: DFlashProposer.commit taking only positions above the highest it has taken, and never forgetting that.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.core import AcceptanceStats, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.state import RequestState
from tests.cases.common import toy_proposer
from tests.scripted import make_test_engine
from tests.toy import reference_greedy, toy_drafter, toy_target

TARGET = toy_target()
PROMPTS = [[(11 * i + 5) % 95 for i in range(25)], [9, 61, 2, 33, 70], [(11 * i + 5) % 95 for i in range(25)]]
NUM_TOKENS = 12
ANSWERS = [reference_greedy(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]

Outcome = tuple[list[int], list[list[float]], AcceptanceStats]


def new_engine() -> tuple[Engine, list[list[float]]]:
    """One seat, and a list that the draft logits of every proposal go into: drafts alone would hide small changes."""
    drafter, proposals = toy_drafter(TARGET), []
    hidden = drafter.hidden

    def noted(block, caches):  # type: ignore[no-untyped-def]
        states = hidden(block, caches)
        proposals.append(drafter.base_logits(states).flatten().tolist())
        return states

    drafter.hidden = noted  # type: ignore[method-assign]
    return make_test_engine(TARGET, toy_proposer(drafter), max_seats=1), proposals


def outcome(engine: Engine, proposals: list[list[float]], prompt: list[int]) -> Outcome:
    proposals.clear()
    request = engine.add(prompt, SamplingParams(max_tokens=NUM_TOKENS))
    while engine.has_work:
        engine.step()
    return request.output_token_ids, list(proposals), request.acceptance


def started(engine: Engine, **params: object) -> RequestState:
    """The first request after its prefill and one cycle."""
    request = engine.add(PROMPTS[0], SamplingParams(**params))  # type: ignore[arg-type]
    for _ in range(2):
        engine.step()
    return request


def end_by_eos(engine: Engine) -> None:
    request = started(engine, stop_token_ids=(ANSWERS[0][8],))
    while engine.has_work:
        engine.step()
    assert request.finish_reason == "stop"


def end_by_cap(engine: Engine) -> None:
    request = started(engine, max_tokens=9)
    while engine.has_work:
        engine.step()
    assert request.finish_reason == "length"


def end_by_abort(engine: Engine) -> None:
    engine.abort(started(engine))


def end_by_exception(engine: Engine) -> None:
    request = started(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TARGET, "best", lambda hidden: (_ for _ in ()).throw(RuntimeError("forced")))
        with pytest.raises(RuntimeError, match="forced"):
            engine.step()
    engine.abort(request)


def end_by_nan(engine: Engine) -> None:
    request, best = started(engine), TARGET.best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TARGET, "best", lambda hidden: (best(hidden)[0] * torch.nan, best(hidden)[1]))
        engine.step()
    assert request.finish_reason == "error"


@pytest.fixture(scope="module")
def fresh() -> list[Outcome]:
    """Each request on an engine of its own."""
    return [outcome(*new_engine(), prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("end", [end_by_eos, end_by_cap, end_by_abort, end_by_exception, end_by_nan])
def test_t047_next_requests_start_from_nothing(end: Callable[[Engine], None], fresh: list[Outcome]) -> None:
    engine, proposals = new_engine()
    end(engine)
    assert not engine.has_work
    for prompt, answer, expected in zip(PROMPTS[1:], ANSWERS[1:], fresh[1:], strict=True):
        found = outcome(engine, proposals, prompt)
        assert found == expected
        assert found[0] == answer
