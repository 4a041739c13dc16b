"""What the client makes of a server's answers: planted streams with a clock of their own, then a real server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking.client import ChatRequest, Sample, ServerClient
from outrider.errors import ConfigError, EngineFault
from tests.serving import serve

CHAT = ChatRequest(messages=({"role": "user", "content": "hello"},), max_tokens=50)
Timed = tuple[float, Any]


class Timeline(httpx.SyncByteStream):
    """Events that come when the shared clock says so."""

    def __init__(self, events: Iterable[Timed]) -> None:
        self.events, self.now_s = list(events), 0.0

    def __iter__(self) -> Iterator[bytes]:
        for at_s, event in self.events:
            self.now_s = at_s
            yield (f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n").encode()


def answer(*events: Timed, request: ChatRequest = CHAT) -> Sample:
    stream = Timeline(events)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=stream))
    return ServerClient("http://server", model="m", clock=lambda: stream.now_s, transport=transport).complete(request)


def piece(text: str = "", num_tokens: int | None = None, finish_reason: str | None = None, **delta: Any) -> Any:
    usage = {} if num_tokens is None else {"usage": {"completion_tokens": num_tokens, "prompt_tokens": 7}}
    return {"choices": [{"delta": {"content": text, **delta}, "finish_reason": finish_reason}], **usage}


def usage(num_tokens: int) -> Any:
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    return {"choices": [], "usage": {"completion_tokens": num_tokens, "prompt_tokens": 7, **details}}


def test_times_and_counts_of_a_plain_stream() -> None:
    found = answer(
        (0.1, piece("", 0, role="assistant")),
        (0.2, piece("ab", 2)),
        (0.5, piece("cde", 5)),
        (0.6, piece("f", 6, "stop")),
        (0.9, usage(6)),
        (0.9, "[DONE]"),
    )
    assert (found.ttft_s, found.e2e_s, found.num_chunks) == (0.2, 0.6, 3)
    assert found.chunk_gaps_s == pytest.approx((0.3, 0.1))
    assert (found.num_prompt_tokens, found.num_output_tokens, found.num_cached_tokens) == (7, 6, 4)
    assert (found.text, found.finish_reason, found.error) == ("abcdef", "stop", None)
    assert found.tpot_s == pytest.approx(0.4 / 5)
    assert found.tokens_per_s == pytest.approx(4 / 0.4)


def test_a_hidden_token_is_a_token_and_an_empty_opening_is_none() -> None:
    found = answer((0.1, piece("")), (0.3, piece("", 1)), (0.4, piece("x", 2, "stop")))
    assert (found.ttft_s, found.num_chunks) == (0.3, 2)


def test_usage_at_the_end_alone_leaves_decode_speed_open() -> None:
    found = answer((0.2, piece("ab")), (0.5, piece("cd", finish_reason="stop")), (0.6, usage(9)))
    assert (found.num_output_tokens, found.num_chunks, found.num_first_tokens, found.tokens_per_s) == (9, 2, None, None)
    assert found.tpot_s == pytest.approx(0.3 / 8)


def test_no_usage_no_guess() -> None:
    found = answer((0.2, piece("ab")), (0.5, piece("cd", finish_reason="stop")))
    assert (found.num_output_tokens, found.tpot_s, found.tokens_per_s, found.error) == (None, None, None, None)


def test_thoughts_calls_and_acceptance() -> None:
    first = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": part}} for part in ('{"city":', '"Ulm"}')]
    stats = {"num_draft_tokens": 3}
    found = answer(
        (0.1, piece(reasoning="hm", reasoning_content="hm")),
        (0.2, piece(tool_calls=[first])),
        (0.3, piece(tool_calls=[more[0]])),
        (0.4, {**piece(tool_calls=[more[1]], finish_reason="tool_calls"), "metrics": {"speculative_decoding": stats}}),
    )
    assert found.reasoning == "hm"
    assert found.tool_calls == ({"id": "c1", "name": "weather", "arguments": '{"city":"Ulm"}'},)
    assert (found.num_chunks, found.finish_reason, found.acceptance) == (4, "tool_calls", stats)


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([(0.1, piece("a", 1)), (0.2, {"error": {"message": "engine died"}})], "engine died"),
        ([(0.1, piece("a", 1))], "lost on its way"),
        ([(0.1, "no json")], "not one of OpenAI's"),
        ([(0.1, {"choices": [3]})], "not one of OpenAI's"),
    ],
)
def test_what_fails_half_way_is_an_error(events: list[Timed], named: str) -> None:
    assert named in (answer(*events).error or "")


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


def test_usage_at_the_last_choice_is_no_chunk_of_text() -> None:
    found = answer((0.5, piece("a whole answer")), (0.5001, piece("", 8, "stop")), (0.6, "[DONE]"))
    assert (found.num_chunks, found.num_output_tokens, found.tpot_s, found.tokens_per_s) == (1, 8, None, None)


def test_usage_that_comes_now_and_then_loses_no_chunk() -> None:
    found = answer((0.1, piece("a", 1)), (0.2, piece("b")), (0.3, piece("c")), (0.4, piece("d", 4, "stop")))
    assert (found.num_chunks, found.num_first_tokens) == (4, 1)


def test_line_separators_inside_a_text_end_no_event() -> None:
    text = "a\u2028b\x85c\x0cd"
    told = json.dumps(piece(text, 1, "stop"), ensure_ascii=False)
    for end in ("\n", "\r\n", "\r"):
        whole = f"data: {told}{end}{end}data: [DONE]".encode()
        for cut in (1, 3, len(whole) - 17, len(whole) - 16, len(whole) - 15):
            stream = httpx.ByteStream(b"")
            stream.__class__ = type(
                "Cut", (httpx.ByteStream,), {"__iter__": lambda _, c=cut, w=whole: iter((w[:c], w[c:]))}
            )
            transport = httpx.MockTransport(lambda _, stream=stream: httpx.Response(200, stream=stream))
            found = ServerClient("http://server", model="m", transport=transport).complete(CHAT)
            assert (found.text, found.error) == (text, None)


def test_an_empty_error_is_none_and_an_answer_given_up_is_one() -> None:
    assert answer((0.1, {**piece("a", 1, "stop"), "error": None})).error is None
    assert "gave the answer up" in str(answer((0.1, piece("a", 1, "abort"))).error)


def asked(response: httpx.Response, **options: Any) -> ServerClient:
    return ServerClient("http://server", transport=httpx.MockTransport(lambda _: response), **options)


def test_a_server_that_does_not_stream_is_named() -> None:
    found = asked(httpx.Response(200, json={"choices": []}), model="m").complete(CHAT)
    assert "does not stream: it answered with application/json" in str(found.error)


def test_a_list_of_models_that_is_none_is_said() -> None:
    for listed in (None, "abc", {"id": 1}):
        with pytest.raises(EngineFault, match="names no model"):
            _ = asked(httpx.Response(200, json={"data": listed})).model


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


def test_usage_that_is_no_count_is_an_error() -> None:
    found = answer((0.1, piece("a")), (0.2, {**piece("", None, "stop"), "usage": {"completion_tokens": "8"}}))
    assert "completion_tokens of its usage is '8'" in str(found.error)
    assert found.num_output_tokens is None
