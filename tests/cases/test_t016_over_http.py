"""T-016 at the server: what usage says was cached is what the engine found, by the boundaries that the server named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from outrider.backends.local import LLM
from outrider.backends.scripted import byte_tokenizer
from outrider.backends.serving import LocalServing
from outrider.engine import kv_cache as kv_cache_module
from outrider.engine.kv_cache import KvCache
from outrider.server.app import create_app
from tests.paged import PAGE_SIZE, paged_engine
from tests.serving import events, listening
from tests.toy import toy_drafter, toy_target

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[httpx.Client, KvCache]]:
    """A toy target and its drafter behind a real server; windows keep only what is just before a boundary."""
    monkeypatch.setattr(kv_cache_module, "WINDOW_SLACK_TOKENS", PAGE_SIZE)
    tokenizer = byte_tokenizer()
    target = toy_target(vocab_size=tokenizer.vocab_size + 1, context_length=256)
    drafter = toy_drafter(target, window=6, context_length=256, mask_token_id=tokenizer.vocab_size)
    engine, kv_cache = paged_engine(target, drafter, context_length=256, prefill_rows=64)
    engine.tokenizer = tokenizer
    backend = LocalServing(LLM(engine, tokenizer), model="toy")
    backend.start()
    with listening(create_app(backend)) as url, httpx.Client(base_url=url, timeout=30.0) as http:
        yield http, kv_cache
    backend.stop()


def chat(http: httpx.Client, content: str, **fields: Any) -> dict[str, Any]:
    """A greedy answer; of a stream, the event that has its usage."""
    messages = [SYSTEM, {"role": "user", "content": content}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if fields.get("stream"):
        return next(each for each in events(response) if each != "[DONE]" and each.get("usage"))
    answer: dict[str, Any] = response.json()
    return answer


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_t016_usage_says_what_was_found(served: tuple[httpx.Client, KvCache]) -> None:
    http, kv_cache = served
    cold = chat(http, "What is two and three?")
    num_tokens = cold["usage"]["prompt_tokens"]
    assert cached(cold) == 0
    hit = chat(http, "What is two and three?")
    assert cached(hit) == (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    assert hit["choices"][0]["message"] == cold["choices"][0]["message"]
    streamed = chat(http, "What is two and three?", stream=True, stream_options={"include_usage": True})
    assert cached(streamed) == cached(hit)
    system = byte_tokenizer().encode("<|turn>system\nBe brief.<turn|>\n")
    other = chat(http, "Name a river.")
    assert cached(other) == len(system) // PAGE_SIZE * PAGE_SIZE
    kv_cache.forget_prefixes()
    assert cached(cold_again := chat(http, "Name a river.")) == 0
    assert cold_again["choices"][0]["message"] == other["choices"][0]["message"]
    assert http.get("/metrics").text.count("prefix_cache_hits_total") >= 1


def test_t016_several_choices_count_their_prompt_once(served: tuple[httpx.Client, KvCache]) -> None:
    """The second choice finds the first one's prompt; the client's prompt was run once, and none of it was there."""
    http, kv_cache = served
    both = chat(http, "Count.", n=2)
    assert cached(both) == 0
    assert both["choices"][0]["message"] == both["choices"][1]["message"]
    again = chat(http, "Count.", n=2)
    assert cached(again) == (again["usage"]["prompt_tokens"] - 1) // PAGE_SIZE * PAGE_SIZE
    kv_cache.assert_consistent()
