"""The engine with more work than room: prompts beside cycles, rows shared out, seats taken back, drafters that fail."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.engine import Engine
from outrider.engine.proposer import FencedProposer
from outrider.engine.rejection import DraftBlock
from outrider.engine.state import RequestState
from outrider.errors import RequestError
from tests.cases.common import toy_proposer
from tests.counted_space import CountedSpace
from tests.scripted import FixedProposer, ScriptedProposer, TableTarget, make_test_engine, run_requests
from tests.toy import reference_greedy, toy_drafter, toy_target

TARGET = toy_target()
PROMPTS = ([5, 17, 80], [3], [44, 9, 61, 2, 33, 70, 12, 8, 50], [7, 7, 21, 90, 4])
NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=NUM_TOKENS)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_a_long_prompt_does_not_hold_up_who_runs() -> None:
    target = TableTarget.constant([0.1, 0.9])
    engine = make_test_engine(target, ScriptedProposer([[1] * 2000] * 2, vocab_size=2), context_length=2000)
    running = engine.add([0], SamplingParams(max_tokens=1000))
    engine.step()
    long = engine.add([1] * 1500, GREEDY)
    num_steps, target.passes = 0, []
    while not long.output_token_ids:
        before = len(running.output_token_ids)
        engine.step()
        num_steps += 1
        assert len(running.output_token_ids) > before
    assert num_steps == -(-1500 // 64)
    prompt_rows = [len(rows.seats) for rows in target.passes if long.seat in rows.seats.tolist()]
    assert max(prompt_rows) == 64


def test_short_prompts_share_a_step() -> None:
    engine = make_test_engine(TableTarget.constant([0.1, 0.9]), max_seats=4, prefill_rows=16)
    requests = [engine.add([0] * length, GREEDY) for length in (5, 6, 5, 1)]
    engine.step()
    assert [len(request.output_token_ids) for request in requests] == [1, 1, 1, 0]
    engine.step()
    assert [len(request.output_token_ids) for request in requests] == [2, 2, 2, 1]


@pytest.mark.parametrize(("row_budget", "expected"), [(64, 4), (6, 2), (3, 0)])
def test_drafts_are_bounded_by_the_rows_of_a_cycle(row_budget: int, expected: int) -> None:
    proposer = ScriptedProposer([[1] * 60] * 2, vocab_size=2)
    engine = make_test_engine(TableTarget.constant([0.1, 0.9]), proposer, max_seats=2, row_budget=row_budget)
    assert run_requests(engine, ([1], GREEDY), ([1], GREEDY)) == [[1] * NUM_TOKENS] * 2
    assert max((asked.draft_length for asked in proposer.asked if len(asked.seats) == 2), default=0) == expected


def mixed_requests() -> list[tuple[Sequence[int], SamplingParams]]:
    return [
        (PROMPTS[0], GREEDY),
        (PROMPTS[1], replace(GREEDY, num_speculative_tokens=0)),
        (PROMPTS[2], SEEDED),
        (PROMPTS[3], replace(SEEDED, num_speculative_tokens=2)),
        (PROMPTS[2], SAMPLED),
    ]


@functools.cache
def solo_texts() -> list[list[int]]:
    """Each request alone, with seats for all: sampled ones take their noise from the order in which they are added."""
    texts = []
    for chosen in range(len(mixed_requests())):
        engine = make_test_engine(TARGET, toy_proposer(toy_drafter(TARGET), num_seats=5), max_seats=5)
        states = [engine.add(prompt, params) for prompt, params in mixed_requests()]
        for index, state in enumerate(states):
            if index != chosen:
                engine.abort(state)
        finish(engine)
        texts.append(states[chosen].output_token_ids)
    return texts


def test_kinds_of_requests_mix() -> None:
    engine = make_test_engine(TARGET, toy_proposer(toy_drafter(TARGET), num_seats=5), max_seats=5, prefill_rows=8)
    assert run_requests(engine, *mixed_requests()) == solo_texts()


@pytest.mark.parametrize("num_pages", [8, 9, 12])
def test_a_preempted_request_writes_the_same(num_pages: int) -> None:
    space = CountedSpace(num_pages)
    engine = make_test_engine(TARGET, toy_proposer(toy_drafter(TARGET), num_seats=5), max_seats=5, space=space)
    states = [engine.add(prompt, params) for prompt, params in mixed_requests()]
    finish(engine)
    assert [state.output_token_ids for state in states] == solo_texts()
    assert engine.scheduler.num_preemptions > 0
    assert (space.num_free, space.used) == (num_pages, {})


def test_a_preempted_request_drafts_as_if_never_out() -> None:
    alone = make_test_engine(TARGET, toy_proposer(toy_drafter(TARGET), num_seats=2), max_seats=2)
    expected = alone.add(PROMPTS[2], GREEDY)
    finish(alone)
    engine = make_test_engine(
        TARGET, toy_proposer(toy_drafter(TARGET), num_seats=2), max_seats=2, space=CountedSpace(8)
    )
    engine.add(PROMPTS[0], GREEDY)
    request = engine.add(PROMPTS[2], GREEDY)
    finish(engine)
    assert engine.scheduler.num_preemptions > 0
    assert (request.output_token_ids, request.acceptance) == (expected.output_token_ids, expected.acceptance)


def test_what_can_never_fit_is_refused() -> None:
    engine = make_test_engine(TableTarget.constant([0.1, 0.9]), space=CountedSpace(5))
    with pytest.raises(RequestError, match=r"21 tokens.*hold 20.*cache_bytes"):
        engine.add([0] * 11, SamplingParams(max_tokens=10))
    assert run_requests(engine, ([0] * 10, SamplingParams(max_tokens=10))) == [[1] * 10]


def test_abort_frees_pages_at_every_stage() -> None:
    space = CountedSpace(40)
    engine = make_test_engine(
        TARGET, toy_proposer(toy_drafter(TARGET), num_seats=2), max_seats=2, prefill_rows=5, space=space
    )
    stages: list[tuple[RequestState, int]] = []
    for num_steps in range(5):  # waiting, twice amid its prompt of 9, running
        request = engine.add(PROMPTS[2], GREEDY)
        for _ in range(num_steps):
            engine.step()
        stages.append((request, request.num_computed_tokens))
        engine.abort(request)
        assert (space.num_free, engine.has_work) == (40, False)
    assert [computed for _, computed in stages][:3] == [0, 5, 9]
    assert run_requests(engine, (PROMPTS[2], GREEDY)) == [reference_greedy(TARGET, PROMPTS[2], NUM_TOKENS)]


def test_text_is_published_at_the_ends_of_prompt_and_answer_and_where_asked() -> None:
    space = CountedSpace(10)
    engine = make_test_engine(TableTarget.constant([0.1, 0.9]), space=space)
    engine.add([0, 0, 1, 0], SamplingParams(max_tokens=3), boundaries=[2])
    finish(engine)
    assert space.published[0] == (0, (0, 0, 1, 0), (2, 4))
    assert space.published[-1] == (0, (0, 0, 1, 0, 1, 1), (2, 4, 6))


class BrokenProposer(FixedProposer):
    """Raises at the n-th call of one of its methods."""

    def __init__(self, method: str, num_calls: int) -> None:
        super().__init__(torch.tensor([0.1, 0.9]))
        self.method, self.calls_left, self.tap_layers = method, num_calls, (0,)

    def _count(self, method: str) -> None:
        if method == self.method:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise RuntimeError("out of drafts")

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        self._count("propose")
        return super().propose(batch, draft_length)

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        self._count("commit")


@pytest.mark.parametrize("num_calls", [0, 2])
@pytest.mark.parametrize("method", ["propose", "commit"])
def test_a_failing_drafter_costs_no_request(method: str, num_calls: int, caplog: pytest.LogCaptureFixture) -> None:
    table = TableTarget(torch.eye(5).roll(1, dims=1) * 9)
    expected = run_requests(make_test_engine(table), ([0], GREEDY), ([2], SEEDED))
    choose = FencedProposer(BrokenProposer(method, num_calls))
    engine = make_test_engine(table, choose)
    assert run_requests(engine, ([0], GREEDY), ([2], SEEDED)) == expected
    assert engine.proposer is None
    assert "out of drafts" in (engine.drafter_fault or "")
    assert "without drafts" in caplog.text
