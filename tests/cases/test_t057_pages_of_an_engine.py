"""T-057: after requests that end in every way, each page is free again, with and without shared prefixes."""

from __future__ import annotations

import random

import pytest

from outrider.core import SamplingParams
from outrider.engine.state import RequestState
from tests.paged import paged_engine
from tests.toy import toy_target


@pytest.mark.parametrize("num_texts", [4, 300], ids=["prefixes shared", "all different"])
def test_t057_no_page_is_lost(num_texts: int) -> None:
    rng = random.Random(num_texts)
    engine, kv_cache = paged_engine(toy_target(), None, context_length=40, budget_bytes=110_000, max_seats=3)
    num_free = kv_cache.num_free_pages
    open_requests: list[RequestState] = []
    for number in range(24):
        text = random.Random(number % num_texts)
        prompt = [text.randrange(95) for _ in range(text.randint(1, 20))]
        params = SamplingParams(max_tokens=rng.randint(1, 9), stop_token_ids=(rng.randrange(96),))
        open_requests.append(engine.add(prompt, params))
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if rng.random() < 0.3:
            request = rng.choice(open_requests)
            if request.finish_reason is None:
                engine.abort(request)
    while engine.has_work:
        engine.step()
    kv_cache.assert_consistent()
    assert kv_cache.num_free_pages == num_free
    assert not any(pages for group in kv_cache.groups for pages in group.pages)
    kv_cache.forget_prefixes()
    assert kv_cache.num_cached_pages == 0
    assert kv_cache.num_free_pages == num_free
    assert {request.seat for request in open_requests} == {-1}
