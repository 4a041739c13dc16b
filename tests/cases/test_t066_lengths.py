"""T-066: lengths are counted by the served tokenizer, template included, and by usage; nothing is shortened in silence.

Seen red: prompts cut by characters ÷ 4, output counted by splitting its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking.arms import Asking, ServerArm, parse_arm
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.prompt_length import sized_items
from outrider.benchmarking.request_sets import Item
from outrider.errors import ConfigError
from tests.serving import Served, serve

SPACES = " " * 100
CONTEXT_LENGTH = 160


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"": Script.of_text(SPACES)}, context_length=CONTEXT_LENGTH) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[ServerClient]:
    with closing(ServerClient(served.url)) as opened:
        yield opened


def arm(client: ServerClient, max_tokens: int) -> ServerArm:
    return ServerArm(parse_arm("a=http://here"), client, Asking(max_tokens=max_tokens, is_chat=True))


def test_t066_a_prompt_of_exactly_the_asked_size(client: ServerClient) -> None:
    asked = arm(client, 8)
    template = asked.count_prompt_tokens(Item(prompt="x")) - 1
    assert template > 0
    items = sized_items(
        [Item(prompt="honey bees live in colonies")] * 2,
        num_tokens=40,
        max_tokens=8,
        count=asked.count_prompt_tokens,
        context_length=CONTEXT_LENGTH,
    )
    assert [len(item.prompt or "") for item in items] == [40 - template] * 2  # a byte is a token here
    assert [asked.measure(item).num_prompt_tokens for item in items] == [40, 40]


def test_t066_what_cannot_fit_is_refused_by_us_and_a_failure_from_the_server(client: ServerClient) -> None:
    with pytest.raises(ConfigError, match="do not fit into a context of 32"):
        sized_items([Item(prompt="x")], num_tokens=32, max_tokens=1, count=lambda _: 1, context_length=32)
    with pytest.raises(ConfigError, match="no cut of"):  # tokens of two characters and a begin: no even number
        sized_items(
            [Item(prompt="honey")],
            num_tokens=32,
            max_tokens=1,
            count=lambda item: 1 + 2 * (len(item.prompt or "") // 2),
        )
    found = arm(client, 8).measure(Item(prompt="x" * 500))
    assert found.error is not None
    assert "HTTP 400" in found.error
    assert found.num_output_tokens is None


def test_t066_output_is_counted_by_usage(client: ServerClient) -> None:
    found = arm(client, 100).measure(Item(prompt="write spaces"))
    assert (found.text, found.num_output_tokens) == (SPACES, 100)
