"""What is made of an answer as it comes: planted streams with a clock of their own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest, ServerClient

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
    stats = {"num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 2}
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


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"completion_tokens": "8"}, "completion_tokens of its usage is '8'"),
        ({"completion_tokens": -3}, "completion_tokens of its usage is -3"),
        ({"completion_tokens": 3, "prompt_tokens": True}, "prompt_tokens of its usage is True"),
        ({"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": [1]}}, "cached_tokens of its usage is"),
        ({"completion_tokens": 3, "prompt_tokens_details": 7}, "not one of OpenAI's"),
        ([8], "not one of OpenAI's"),
    ],
)
def test_usage_that_is_no_count_is_an_error(told: Any, named: str) -> None:
    found = answer((0.1, piece("a")), (0.2, {**piece("", None, "stop"), "usage": told}))
    assert named in str(found.error)
    assert found.num_output_tokens is None


def test_usage_that_comes_in_parts_is_put_together() -> None:
    found = answer(
        (0.1, piece("a", 1)), (0.2, piece("b", finish_reason="stop")), (0.3, {"usage": {"completion_tokens": 2}})
    )
    assert (found.num_prompt_tokens, found.num_output_tokens) == (7, 2)


@pytest.mark.parametrize("told", ["fast", 3, {"num_draft_tokens": 3}, {"num_spec_steps": "1"}, [1]])
def test_figures_of_another_shape_are_another_servers(told: Any) -> None:
    for metrics in ({"speculative_decoding": told}, told):
        found = answer((0.1, {**piece("a", 1, "stop"), "metrics": metrics}))
        assert (found.acceptance, found.error) == (None, None)


def test_calls_that_cannot_be_put_in_order_are_an_error() -> None:
    calls = [{"index": index, "function": {"name": "f"}} for index in (0, None)]
    assert "the index of a call is None" in str(answer((0.1, piece(tool_calls=calls))).error)
