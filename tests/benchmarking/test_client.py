"""What the client asks, what it takes for an answer, and which server it takes it from."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest, ServerClient
from outrider.errors import ConfigError, EngineFault
from tests.benchmarking.test_answer import CHAT
from tests.serving import serve


def test_a_refusal_and_a_broken_line_are_errors() -> None:
    def served(response: httpx.Response | Exception) -> Sample:
        def handle(_: httpx.Request) -> httpx.Response:
            if isinstance(response, Exception):
                raise response
            return response

        return ServerClient("http://server/v1/", model="m", transport=httpx.MockTransport(handle)).complete(CHAT)

    refused = served(httpx.Response(400, json={"error": {"message": "too long"}}))
    assert (refused.error, refused.ttft_s, refused.num_output_tokens) == ("HTTP 400: too long", None, None)
    assert served(httpx.Response(502, text="<html>")).error == "HTTP 502: <html>"
    assert "reset" in (served(httpx.ReadError("reset")).error or "")


def test_the_body_has_what_was_asked() -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    request = ChatRequest(prompt="x", max_tokens=3, seed=5, tools=tools, extra={"speculative": {"enabled": False}})
    body = request.body("m")
    assert (request.path, body["prompt"], body["seed"]) == ("/v1/completions", "x", 5)
    assert body["speculative"] == {"enabled": False}
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert CHAT.path == "/v1/chat/completions"
    with pytest.raises(ConfigError, match="either messages or a prompt"):
        ChatRequest(max_tokens=3)


def other_server(owner: str, metrics: str) -> ServerClient:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": owner}]})
        return httpx.Response(200, text=metrics)

    return ServerClient("http://server", transport=httpx.MockTransport(handle))


@pytest.mark.parametrize(
    ("owner", "metrics", "kind"),
    [
        ("vllm", "", "vllm"),
        ("sglang", "", "sglang"),
        ("llamacpp", "", "llama.cpp"),
        ("me", "# HELP vllm:x\nsglang:x 1", "sglang"),
        ("me", "llamacpp:x 1", "llama.cpp"),
        ("me", "vllm:x 1", "vllm"),
        ("me", "", "unknown"),
        ("outrider", "vllm:x 1", "outrider"),  # under another prefix it is ours still
    ],
)
def test_the_kind_of_server(owner: str, metrics: str, kind: str) -> None:
    assert other_server(owner, metrics).server_kind() == kind


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineFault, match=r"127\.0\.0\.1:9"):
        ServerClient("http://127.0.0.1:9").metrics_text()
    with pytest.raises(ConfigError, match="no URL"):
        ServerClient("127.0.0.1:9")


def test_over_http_from_many_threads() -> None:
    scripts = {"hello": Script.of_text("The answer.", block_tokens=4), "": Script.of_text("Other.", drafted=False)}
    with serve(scripts) as served:
        client = ServerClient(served.url)
        plain = ChatRequest(prompt="x", max_tokens=50)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(client.complete, [CHAT, plain] * 8))
        assert client.model == "scripted"
        assert client.server_kind() == "outrider"
        assert "outrider:generation_tokens_total" in client.metrics_text()
        client.close()
    chats, plains = found[::2], found[1::2]
    assert {each.text for each in chats} == {"The answer."}
    assert {each.num_output_tokens for each in chats} == {12}  # 11 characters and the end of the turn
    assert {each.num_chunks for each in chats} == {3}
    assert {each.num_first_tokens for each in chats} == {4}
    assert {(each.text, each.acceptance is None) for each in plains} == {("Other.", True)}
    assert {(each.acceptance or {})["num_draft_tokens"] for each in chats} == {9}


def asked(response: httpx.Response, **options: Any) -> ServerClient:
    return ServerClient("http://server", transport=httpx.MockTransport(lambda _: response), **options)


def test_a_server_that_does_not_stream_is_named() -> None:
    found = asked(httpx.Response(200, json={"choices": []}), model="m").complete(CHAT)
    assert "does not stream: it answered with application/json" in str(found.error)


def test_a_list_of_models_that_is_none_is_said() -> None:
    for listed in (None, "abc", {"id": 1}):
        with pytest.raises(EngineFault, match="names no model"):
            _ = asked(httpx.Response(200, json={"data": listed})).model


def test_a_server_that_lists_no_models_yet_is_quoted() -> None:
    loading = httpx.Response(503, json={"error": {"message": "the model is loading"}})
    with pytest.raises(EngineFault, match="HTTP 503: the model is loading"):
        _ = asked(loading).model


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("http://[::1", {}, "is no URL"),
        ("http://a", {"timeout_s": -1.0}, "--timeout-s"),
        ("http://a", {"timeout_s": float("nan")}, "--timeout-s"),
        ("http://a", {"api_key": "é"}, "--api-key"),
        ("http://a", {"api_key": "a\nb"}, "--api-key"),
    ],
)
def test_what_cannot_be_asked_is_refused(url: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServerClient(url, **options)


class Pinging(httpx.SyncByteStream):
    """A connection that is kept alive, a second a ping, and brings nothing."""

    now_s = 0.0

    def __iter__(self) -> Iterator[bytes]:
        while self.now_s < 1000:
            self.now_s += 1.0
            yield b": ping\n\n"


def test_an_answer_that_keeps_silent_ends_though_its_connection_lives() -> None:
    stream = Pinging()
    found = asked(httpx.Response(200, stream=stream), model="m", timeout_s=30.0, clock=lambda: stream.now_s).complete(
        CHAT
    )
    assert "kept silent for 30 s" in str(found.error)
    assert stream.now_s < 40
