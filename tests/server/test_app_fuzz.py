"""Requests made from the server's own description, and against it: whatever comes, never a 5xx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.backends.scripted import Script
from tests.server.embedded import serve_embedded
from tests.serving import Served, eventually, serve

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
MOST = {"max_tokens": 8, "max_completion_tokens": 8, "n": 2}  # or an answer goes on to the end of its context, 16 times
TIMEOUT_S = 60.0
ANSWER = "<|channel>thought\nx<channel|>Hello 🙂"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"": Script.of_text(ANSWER, block_tokens=5)}) as served:
        yield served


def shorten(body: dict[str, Any]) -> None:
    """Ask for less, where what is asked could be answered: wrong values stay."""
    for name, most in MOST.items():
        value = body.get(name)
        if value is None or (isinstance(value, int) and value > most):
            body[name] = most


def fuzz(served: Served, num_examples: int, *, is_short: bool = False) -> Counter[tuple[str, int]]:
    """So many requests over all operations; how often each path gave each status."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    modes = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    posts = [operation for operation in operations if operation.method == "post"]
    statuses: Counter[tuple[str, int]] = Counter()

    @settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of([operation.as_strategy(mode) for operation in posts for mode in modes]), st.booleans())
    def send(case: schemathesis.Case, is_mended: bool) -> None:
        if isinstance(case.body, dict) and is_mended:  # what is random there is always refused, which says little
            case.body.pop("model", None)
            if "messages" in case.body:
                case.body["messages"] = MESSAGES
        if isinstance(case.body, dict) and is_short:
            shorten(case.body)
        response = case.call(base_url=served.url, timeout=TIMEOUT_S)
        statuses[case.path, response.status_code] += 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()) == {"error"}, response.text

    send()
    for operation in operations:
        if operation.method == "get":
            assert operation.Case().call(base_url=served.url).status_code == 200
    return statuses


def test_some_requests_are_answered(served: Served) -> None:
    statuses = fuzz(served, 30)
    assert sum(statuses.values()) >= 30


def check(statuses: Counter[tuple[str, int]], num_examples: int) -> None:
    """Enough were sent; every path has refused some, and each pair of paths (texts, tokens) has answered some."""
    assert sum(statuses.values()) >= num_examples
    assert all(statuses[path, 400] > 0 for path in PATHS), statuses
    for pair in (PATHS[:2], PATHS[2:]):
        assert sum(statuses[path, 200] for path in pair) > 0, statuses


@pytest.mark.slow
def test_two_thousand_requests_are_answered(served: Served) -> None:
    statuses = fuzz(served, 2000)
    check(statuses, 2000)
    assert all(statuses[path, 200] > 0 for path in PATHS), statuses


@pytest.mark.slow
def test_two_hundred_requests_are_answered_by_the_engine() -> None:
    with serve_embedded() as served:
        before = served.backend.gauges()
        check(fuzz(served, 200, is_short=True), 200)
        assert served.backend.fault is None
        eventually(lambda: served.backend.gauges().num_running == 0)
        assert served.backend.gauges().num_free_pages == before.num_free_pages
        assert served.backend.gauges().num_output_tokens > before.num_output_tokens
