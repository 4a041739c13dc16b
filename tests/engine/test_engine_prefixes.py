"""Shared prefixes under all that can befall a request: text and drafts are those of an engine that had none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine import kv_cache as kv_cache_module
from outrider.engine.engine import Engine
from outrider.engine.kv_cache import KvCache
from outrider.engine.state import RequestState
from outrider.models.attention import GivenRows
from outrider.models.gemma import GemmaTarget
from outrider.models.multimodal import PromptRows
from tests.paged import PAGE_SIZE, paged_engine
from tests.toy import reference_greedy, toy_drafter, toy_target

TARGET = toy_target()
DRAFTER = toy_drafter(TARGET, window=6)
PROMPT = [(11 * i + 5) % 95 for i in range(40)]
GREEDY = SamplingParams(max_tokens=8)


def new_engine(**settings: int) -> tuple[Engine, KvCache]:
    return paged_engine(TARGET, DRAFTER, **settings)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def run(engine: Engine, *prompts: Sequence[int], params: SamplingParams = GREEDY) -> list[RequestState]:
    """All at once."""
    requests = [engine.add(prompt, params) for prompt in prompts]
    finish(engine)
    return requests


ALONE: dict[str, RequestState] = {}


def assert_as_alone(request: RequestState) -> None:
    """The text and acceptance of an engine that has seen nothing before."""
    key = f"{request.prompt_token_ids} {request.params}"
    if key not in ALONE:
        (ALONE[key],) = run(new_engine()[0], request.prompt_token_ids, params=request.params)
    alone = ALONE[key]
    assert request.output_token_ids == alone.output_token_ids
    assert request.acceptance == alone.acceptance
    assert request.finish_reason == "length"


def assert_at_rest(kv_cache: KvCache) -> None:
    kv_cache.assert_consistent()
    assert kv_cache.num_free_pages == kv_cache.num_pages


def test_the_same_prompt_twice_at_once() -> None:
    engine, kv_cache = new_engine()
    requests = run(engine, PROMPT, PROMPT, PROMPT)
    assert [request.num_cached_tokens for request in requests] == [0, 36, 36]
    for request in requests:
        assert_as_alone(request)
    assert_at_rest(kv_cache)


def test_a_text_is_put_together_only_when_it_has_a_new_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """To do so for every token would cost a long text more than its cycles."""
    engine, kv_cache = new_engine()
    offered = list[int]()
    publish = kv_cache.publish

    def noted(seat: int, token_ids: Sequence[int], boundaries: Sequence[int]) -> None:
        offered.append(len(token_ids) // PAGE_SIZE)
        publish(seat, token_ids, boundaries)

    monkeypatch.setattr(kv_cache, "publish", noted)
    (request,) = run(engine, PROMPT, params=SamplingParams(max_tokens=24, num_speculative_tokens=0))
    assert offered == sorted(set(offered))
    assert offered[-1] == (len(PROMPT) + 23) // PAGE_SIZE
    assert len(request.output_token_ids) == 24


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prompt_dropped_half_way_leaves_what_it_had(num_steps: int) -> None:
    engine, kv_cache = new_engine()
    dropped = engine.add(PROMPT, GREEDY)
    for _ in range(num_steps):
        engine.step()
    assert not dropped.output_token_ids
    engine.abort(dropped)
    assert_at_rest(kv_cache)
    (request,) = run(engine, PROMPT)
    assert request.num_cached_tokens == 8 * num_steps
    assert_as_alone(request)
    assert_at_rest(kv_cache)


@pytest.mark.parametrize("num_tokens", [PAGE_SIZE, PAGE_SIZE + 1])
def test_a_prompt_of_one_page(num_tokens: int) -> None:
    engine, kv_cache = new_engine()
    requests = run(engine, PROMPT[:num_tokens]) + run(engine, PROMPT[:num_tokens])
    assert [request.num_cached_tokens for request in requests] == [0, num_tokens - 1 if num_tokens > PAGE_SIZE else 0]
    for request in requests:
        assert_as_alone(request)
    assert_at_rest(kv_cache)


def test_greedy_and_seeded_requests_share() -> None:
    engine, _ = new_engine()
    sampled = replace(GREEDY, temperature=1.0, seed=5)
    run(engine, PROMPT)
    (drawn,) = run(engine, PROMPT, params=sampled)
    (greedy,) = run(engine, PROMPT)
    assert drawn.num_cached_tokens == greedy.num_cached_tokens == 36
    assert drawn.output_token_ids != greedy.output_token_ids
    assert_as_alone(drawn)
    assert_as_alone(greedy)


def test_plain_requests_leave_the_drafter_its_context() -> None:
    engine, _ = new_engine()
    (plain,) = run(engine, PROMPT, params=replace(GREEDY, num_speculative_tokens=0))
    (request,) = run(engine, [*PROMPT, *plain.output_token_ids, 3])
    assert request.num_cached_tokens == 44  # 47 rows were committed
    assert_as_alone(request)


def test_embeddings_are_never_shared() -> None:
    engine, kv_cache = new_engine()
    run(engine, PROMPT)
    is_given, embeddings = torch.zeros(40, dtype=torch.bool), torch.zeros(40, 32, dtype=torch.float64)
    is_given[3] = True
    given = PromptRows(torch.tensor(PROMPT), torch.arange(40), GivenRows(is_given, embeddings))
    requests = [engine.add_rows(given, GREEDY) for _ in range(2)]
    finish(engine)
    assert [request.num_cached_tokens for request in requests] == [0, 0]
    expected = reference_greedy(TARGET, PROMPT, 8, given.given)
    assert [request.output_token_ids for request in requests] == [expected, expected]
    (request,) = run(engine, [*PROMPT, *expected, 1])
    assert request.num_cached_tokens == 40  # of the first prompt's text alone
    assert_as_alone(request)
    assert_at_rest(kv_cache)


def least_budget(num_seats: int) -> int:
    """Bytes of one whole context and every seat's windows."""
    plan = new_engine(max_seats=num_seats)[1].plan
    counts = [plan.num_seats * group.width if group.window is not None else group.width for group in plan.groups]
    return sum(group.page_bytes * count for group, count in zip(plan.groups, counts, strict=True))


def tight_engine(context_length: int = 128) -> tuple[Engine, KvCache]:
    settings = {"max_seats": 2, "context_length": context_length}
    return paged_engine(TARGET, DRAFTER, budget_bytes=least_budget(2), **settings)


def test_who_lost_its_seat_goes_on_as_before() -> None:
    """Two texts that do not fit beside each other: the younger one is pushed out."""
    engine, kv_cache = tight_engine()
    long, other = [(7 * i + 3) % 95 for i in range(60)], [(5 * i + 1) % 95 for i in range(60)]
    first = engine.add(long, SamplingParams(max_tokens=40))
    while not first.output_token_ids:
        engine.step()
    second = engine.add(other, SamplingParams(max_tokens=10))
    finish(engine)
    assert second.num_preemptions > 0
    assert second.num_cached_tokens == 0
    for request in (first, second):
        assert_as_alone(request)
    assert_at_rest(kv_cache)


def test_under_pressure_the_hit_is_gone_and_the_text_the_same() -> None:
    engine, kv_cache = tight_engine()
    run(engine, PROMPT)
    run(engine, [(7 * i + 3) % 95 for i in range(110)])
    (request,) = run(engine, [*PROMPT, 1])
    assert request.num_cached_tokens < 40
    assert_as_alone(request)
    assert_at_rest(kv_cache)


def test_where_nothing_is_kept_only_those_at_the_same_time_share() -> None:
    engine, kv_cache = new_engine()
    for group in kv_cache.groups:
        group.pool.max_cached_pages = 0
    requests = run(engine, PROMPT, PROMPT) + run(engine, PROMPT)
    assert [request.num_cached_tokens for request in requests] == [0, 36, 0]
    for request in requests:
        assert_as_alone(request)
    assert kv_cache.num_cached_pages == 0
    assert_at_rest(kv_cache)


def test_a_long_answer_keeps_what_its_prompt_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of windows are kept before boundaries, not all along an answer: the next turn may not repeat a thought."""
    monkeypatch.setattr(kv_cache_module, "WINDOW_SLACK_TOKENS", 4)
    engine, kv_cache = new_engine()
    run(engine, PROMPT, params=SamplingParams(max_tokens=48))
    for group in kv_cache.groups:
        if group.plan.window is not None:
            num_kept = (group.plan.window + 4) // PAGE_SIZE + 1
            assert group.pool.num_cached <= 2 * num_kept  # before the end of the prompt, and before that of the answer
    (request,) = run(engine, [*PROMPT, 1, 2, 3])
    assert request.num_cached_tokens == 40
    assert_as_alone(request)
    assert_at_rest(kv_cache)


class PoisonedTarget(GemmaTarget):
    """While `is_ill`, keys and values of all that it runs are NaN."""

    is_ill = False

    def forward(self, rows, caches, **options):  # type: ignore[no-untyped-def]
        output = super().forward(rows, caches, **options)
        if self.is_ill:
            for cache in caches:
                pages = cache.table[rows.seats, rows.positions // PAGE_SIZE % cache.table.shape[1]]
                cache.keys[pages, rows.positions % PAGE_SIZE] = torch.nan
            output = replace(output, hidden=torch.full_like(output.hidden, torch.nan))
        return output


def test_what_a_failed_request_computed_is_not_shared() -> None:
    target = toy_target()
    target.__class__ = PoisonedTarget
    engine, kv_cache = paged_engine(target, toy_drafter(target, window=6))
    run(engine, PROMPT[:16])
    target.is_ill = True  # type: ignore[attr-defined]
    (failed,) = run(engine, PROMPT)
    assert failed.finish_reason == "error"
    target.is_ill = False  # type: ignore[attr-defined]
    (request,) = run(engine, PROMPT)
    assert request.num_cached_tokens == 0  # those of the first request are in doubt, too
    assert_as_alone(request)
    assert_at_rest(kv_cache)
