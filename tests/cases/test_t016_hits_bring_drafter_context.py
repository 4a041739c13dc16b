"""T-016: a prefix found in the caches brings the drafter's context with it: text and drafts are those of a cold run."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from outrider.core import AcceptanceStats, SamplingParams
from outrider.engine import kv_cache as kv_cache_module
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


def run(engine: Engine, prompt: list[int], *, boundaries: tuple[int, ...] = (), num_tokens: int = 12) -> RequestState:
    request = engine.add(prompt, SamplingParams(max_tokens=num_tokens), boundaries=boundaries)
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


def assert_hit_equals_cold(
    prompt: list[int], before: list[list[int]], *, num_cached: int, window: int | None, num_tokens: int = 12
) -> None:
    cold, _, cold_logits = new_engine(window)
    expected = run(cold, prompt, num_tokens=num_tokens)
    engine, kv_cache, logits = new_engine(window)
    for text in before:
        run(engine, text, boundaries=(20,), num_tokens=num_tokens)
    spoil_free_pages(kv_cache)
    logits.clear()
    request = run(engine, prompt, num_tokens=num_tokens)
    assert request.num_cached_tokens == num_cached
    assert request.output_token_ids == expected.output_token_ids == reference_greedy(TARGET, prompt, num_tokens)
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


@pytest.mark.parametrize("num_tokens", range(15, 34))
def test_t016_at_every_place_in_a_page(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than any window, which keeps only what is near the end: the hit is up to the last border before it."""
    monkeypatch.setattr(kv_cache_module, "WINDOW_SLACK_TOKENS", PAGE_SIZE)
    text = [(11 * i + 5) % 95 for i in range(num_tokens)]
    assert_hit_equals_cold(
        [*text, 7, 8, 9], [text], num_cached=num_tokens // PAGE_SIZE * PAGE_SIZE, window=6, num_tokens=3
    )


@pytest.mark.parametrize("num_tokens", [5, 6, 8, 9])
def test_t016_shorter_than_a_window(num_tokens: int) -> None:
    assert_hit_equals_cold(
        PROMPT[:num_tokens], [PROMPT], num_cached=(num_tokens - 1) // PAGE_SIZE * PAGE_SIZE, window=6, num_tokens=3
    )


def test_t016_two_continuations_at_once() -> None:
    """Both go on from the same pages, in the same passes."""
    engine, kv_cache, _ = new_engine(window=6)
    run(engine, PROMPT)
    ends = ([1, 2, 3], [4, 5])
    requests = [engine.add([*PROMPT, *end], PARAMS) for end in ends]
    while engine.has_work:
        engine.step()
    for request in requests:
        assert request.num_cached_tokens == 24
        alone = run(new_engine(window=6)[0], list(request.prompt_token_ids))
        assert (request.output_token_ids, request.acceptance) == (alone.output_token_ids, alone.acceptance)
    kv_cache.assert_consistent()


def test_t016_hits_are_whole_pages() -> None:
    assert PAGE_SIZE == 4
    assert_hit_equals_cold([*PROMPT[:23], 1], [PROMPT], num_cached=20, window=None)
