"""T-016: a prefix found in the caches brings the drafter's context with it: text and drafts are those of a cold run."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from outrider.core import AcceptanceStats, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.kv_cache import KvCache
from outrider.engine.state import RequestState
from tests.embedded import embedded_llm
from tests.paged import PAGE_SIZE, paged_engine
from tests.toy import reference_greedy, toy_drafter, toy_target

TARGET = toy_target()
PROMPT = [(11 * i + 5) % 95 for i in range(24)]
PARAMS = SamplingParams(max_tokens=12)


def new_engine(window: int | None = None) -> tuple[Engine, KvCache, list[Tensor]]:
    """An engine, and a list of the logits of all its draft blocks."""
    drafter, logits = toy_drafter(TARGET, window=window), []
    hidden = drafter.hidden

    def noted(block, caches):  # type: ignore[no-untyped-def]
        states = hidden(block, caches)
        logits.append(drafter.base_logits(states))
        return states

    drafter.hidden = noted  # type: ignore[method-assign]
    return *paged_engine(TARGET, drafter), logits


def run(engine: Engine, prompt: list[int], *, boundaries: tuple[int, ...] = ()) -> RequestState:
    request = engine.add(prompt, PARAMS, boundaries=boundaries)
    while engine.has_work:
        engine.step()
    return request


def spoil_free_pages(kv_cache: KvCache) -> None:
    """NaN wherever nothing is held or can be found."""
    for group in kv_cache.groups:
        for cache in (*kv_cache.target_caches, *kv_cache.drafter_caches):
            if cache.table is group.table:
                for page in group.pool._blank:
                    cache.keys[page] = cache.values[page] = math.nan


def assert_hit_equals_cold(prompt: list[int], before: list[list[int]], *, num_cached: int, window: int | None) -> None:
    cold, _, cold_logits = new_engine(window)
    expected = run(cold, prompt)
    engine, kv_cache, logits = new_engine(window)
    for text in before:
        run(engine, text, boundaries=(20,))
    spoil_free_pages(kv_cache)
    logits.clear()
    request = run(engine, prompt)
    assert request.num_cached_tokens == num_cached
    assert request.output_token_ids == expected.output_token_ids == reference_greedy(TARGET, prompt, PARAMS.max_tokens)
    assert request.acceptance == expected.acceptance
    assert all(bool(each.isfinite().all()) for each in logits)
    assert len(logits) == len(cold_logits)
    assert all(bool((one - other).abs().max() < 1e-9) for one, other in zip(logits, cold_logits, strict=True))
    kv_cache.assert_consistent()


@pytest.mark.parametrize("window", [None, 6])
def test_t016_the_same_beginning_and_another_end(window: int | None) -> None:
    assert_hit_equals_cold([*PROMPT, 7, 8, 9], [PROMPT], num_cached=24, window=window)


def test_t016_the_same_system_prompt_and_another_user() -> None:
    """They part at 21; 20 is a boundary that the first request names."""
    assert_hit_equals_cold([*PROMPT[:21], 1, 2, 3], [PROMPT], num_cached=20, window=6)


def test_t016_a_second_turn() -> None:
    answer = reference_greedy(TARGET, PROMPT, 12)
    assert_hit_equals_cold([*PROMPT, *answer, 4, 5, 6], [PROMPT], num_cached=32, window=6)  # 35 rows were committed


def test_t016_a_branch_in_the_middle_of_an_answer() -> None:
    answer = reference_greedy(TARGET, PROMPT, 12)
    branch = [*PROMPT, *answer[:6], 4, 5, 6]
    assert_hit_equals_cold(branch, [PROMPT], num_cached=28, window=6)


def test_t016_hit_and_miss_on_the_embedded_default() -> None:
    def outcome(num_cached: int, prompt: list[int]) -> tuple[list[int], AcceptanceStats]:
        request = llm.engine.add(prompt, SamplingParams(max_tokens=16))
        while llm.engine.has_work:
            llm.engine.step()
        assert request.num_cached_tokens == num_cached
        return request.output_token_ids, request.acceptance

    llm = embedded_llm()
    forget = llm.engine.scheduler.space.kv_cache.forget_prefixes  # type: ignore[attr-defined]
    forget()
    system = llm.encode("You are a helpful assistant. Answer every question in a short list of numbers, in order.\n\n")
    first, other = (system + llm.encode(text)[1:] for text in ("1, 2, 3, 4, 5,", "10, 20, 30, 40,"))
    aligned = len(system) // 16 * 16
    cold = outcome(0, other)
    forget()
    answer, _ = outcome(0, first)
    assert outcome(aligned, other) == cold
    for later in ([*first, *answer, *other[-4:]], [*first, *answer[:11], *other[-4:]]):  # a second turn, a branch
        forget()
        cold = outcome(0, later)
        forget()
        outcome(0, first)
        assert outcome((len(later) - 5) // 16 * 16, later) == cold


def test_t016_hits_are_whole_pages() -> None:
    assert PAGE_SIZE == 4
    assert_hit_equals_cold([*PROMPT[:23], 1], [PROMPT], num_cached=20, window=None)
