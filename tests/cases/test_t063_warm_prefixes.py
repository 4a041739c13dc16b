"""T-063: no point of a sweep finds the prompts of an earlier one in the prefix cache unnoticed.

Seen red: prompts without salt, and salts from a fixed seed by default.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.integrity import cached_share, examine
from outrider.benchmarking.request_sets import Item, RequestSet
from outrider.benchmarking.runner import Load, Run, run_load
from tests.serving import serve

PROMPTS = RequestSet("ten", tuple(Item(prompt=f"{number}: go on ever so") for number in range(10)))


@pytest.fixture
def client() -> Iterator[ServerClient]:
    with serve({"": Script.of_text("ok")}, prefix_page_tokens=4) as served, ServerClient(served.url) as asking:
        yield asking


def sweep(client: ServerClient, items: RequestSet = PROMPTS, **load: object) -> list[Run]:
    shared = {"num_requests": 10, "max_tokens": 4, **load}
    return [run_load(client, items, Load(concurrency=concurrency, **shared)) for concurrency in (1, 2, 4)]  # type: ignore[arg-type]


def faults(run: Run) -> set[str]:
    return {each.name for each in examine(run) if each.is_fatal} & {"cache_hits", "cache_bypass"}


def test_t063_prompts_are_new_at_each_point(client: ServerClient) -> None:
    found = sweep(client)
    assert [faults(each) for each in found] == [set(), set(), set()]
    assert all((cached_share(each) or 0) < 0.05 for each in found)


def test_t063_the_same_seed_spoils_the_later_points(client: ServerClient) -> None:
    found = sweep(client, seed=5)
    assert [bool(faults(each)) for each in found[1:]] == [True, True]
    assert all((cached_share(each) or 0) > 0.9 for each in found[1:])


def test_t063_a_declared_prefix_is_reported_and_not_a_fault(client: ServerClient) -> None:
    shared = "Be kind"  # with the begin token 8 of 20 tokens, each a character
    items = RequestSet(
        "shared", tuple(Item(prompt=f"{shared}{chr(97 + at)}{'qwertzuiop'[at]}n to say") for at in range(10))
    )
    found = run_load(client, items, Load(num_requests=10, is_salted=False, num_warmups=0, expected_cached_share=8 / 20))
    assert cached_share(found) == pytest.approx(8 / 20, abs=0.05)
    assert faults(found) == set()
