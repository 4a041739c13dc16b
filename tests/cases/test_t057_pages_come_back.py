"""T-057: when the queue has drained, as many pages are free as at the start; what is kept on purpose can be dropped.

At the level of pages: a request begins, grows and ends anywhere, also in the middle of its prompt or without room.
Seen red: release() forgetting the drafter's last group; a dropped page not let go; share() counted twice.
"""

from __future__ import annotations

import random

import pytest

from outrider.engine.cache_plan import plan_pages
from outrider.engine.kv_cache import KvCache
from tests.toy import CPU, WINDOW, toy_drafter, toy_target

NUM_SEATS, ROWS, CONTEXT_LENGTH = 4, 5, 40


def make_cache(*, is_kept: bool) -> KvCache:
    """F1 and F2, with little memory."""
    target = toy_target()
    layers = target.config.layers, toy_drafter(target, window=WINDOW).config.layers
    sizes = {"num_seats": NUM_SEATS, "context_length": CONTEXT_LENGTH, "max_rows": ROWS, "page_size": 4}
    plan = plan_pages(
        *layers, dtype=target.dtype, budget_bytes=500_000, max_cached_bytes=None if is_kept else 0, **sizes
    )
    return KvCache.allocate(plan, *layers, dtype=target.dtype, device=CPU)


def live_once(cache: KvCache, seat: int, prompt: list[int], length: int, last_row: int) -> None:
    """Prefill and decode to `length` tokens, or until `last_row` or the memory ends it."""
    start = cache.match_prefix(prompt)
    cache.adopt(seat, prompt, start)
    text = [*prompt, *[(prompt[0] + i) % 96 for i in range(length - len(prompt))]]
    while start < min(length, last_row):
        num_rows = min(ROWS, length - start)
        if not cache.reserve(seat, num_committed=start, num_rows=num_rows):
            break
        start += num_rows if start + num_rows < len(prompt) else 1
        cache.publish(seat, text[:start], [len(prompt), start])


@pytest.mark.parametrize("is_kept", [True, False], ids=["prefix cache", "no prefix cache"])
def test_t057_three_hundred_requests_leave_nothing_behind(is_kept: bool) -> None:
    cache, chance = make_cache(is_kept=is_kept), random.Random(3)
    prompts = [[chance.randrange(96) for _ in range(20)] for _ in range(8)]
    num_hits = most_cached = 0
    for index in range(300):
        seat = index % NUM_SEATS
        cache.release(seat)  # whoever had it before
        prompt = chance.choice(prompts)[: chance.randint(1, 20)]
        num_hits += cache.match_prefix(prompt) > 0
        live_once(cache, seat, prompt, len(prompt) + chance.randint(1, 15), chance.choice([7, 15, 99]))
        most_cached = max(most_cached, cache.num_cached_pages)
        if index % 100 == 99:
            for each in range(NUM_SEATS):
                cache.release(each)
            cache.assert_consistent()
            assert cache.num_free_pages == cache.num_pages
            assert not any(pages for group in cache.groups for pages in group.pages)
            assert not any(cache.page_keys)
    assert num_hits > 0  # without the prefix cache, on pages that another request holds still
    assert (most_cached > 0) == is_kept
    cache.forget_prefixes()
    assert cache.num_cached_pages == 0
    assert cache.num_free_pages == cache.num_pages
    cache.assert_consistent()
