"""What the load test's client makes of a server's answers, the bad ones included."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tools.load_server import Job, Outcome, http_client, read_metrics


def answer(job: Job, response: httpx.Response) -> Outcome:
    """The job answered by a server that has this one answer."""
    return http_client("http://server", transport=httpx.MockTransport(lambda request: response))(job)


def event(tokens: list[str], finish_reason: str | None = None) -> str:
    choice = {"index": 0, "text": "".join(tokens), "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice], 'outrider': {'tokens': tokens}})}\n\n"


DONE = "data: [DONE]\n\n"
GOOD = Job(0, "good", "x", 3)
ERROR = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}


def streamed(*events: str) -> httpx.Response:
    return httpx.Response(200, text="".join(events))


def test_a_stream_is_read_to_its_end() -> None:
    found = answer(GOOD, streamed(event(["a", "b"]), event(["c"], "length"), DONE))
    assert found == Outcome("length", ("a", "b", "c"), "abc", 1)


@pytest.mark.parametrize("events", [[], [event(["a"])], [event(["a"]), DONE], [event(["a"], "length")]])
def test_a_stream_without_its_end_is_lost(events: list[str]) -> None:
    assert answer(GOOD, streamed(*events)).end == "lost"


def test_ends_are_counted_and_errors_told() -> None:
    assert answer(GOOD, streamed(event(["a"], "length"), event([], "length"), DONE)).num_ends == 2
    assert answer(GOOD, streamed(event(["a"]), f"data: {json.dumps({'error': ERROR})}\n\n")).end == "error"
    assert answer(GOOD, httpx.Response(503, json={"error": ERROR})).end == "error"


def test_a_connection_that_breaks_is_lost() -> None:
    def broken(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset")

    assert http_client("http://server", transport=httpx.MockTransport(broken))(GOOD).end == "lost"


def test_a_cancelled_stream_is_read_no_further() -> None:
    read: list[int] = []

    def events() -> Iterator[bytes]:
        for i in range(5):
            read.append(i)
            yield event([str(i)]).encode()

    job = Job(0, "cancelled", "x", 5, cancel_after_tokens=1)
    assert answer(job, httpx.Response(200, content=events())) == Outcome("cancelled", ("0", "1"), "01")
    assert read == [0, 1]


def test_bad_jobs_differ_and_must_be_refused_in_openais_shape() -> None:
    sent: list[bytes] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        return httpx.Response(400, json={"error": ERROR})

    client = http_client("http://server", transport=httpx.MockTransport(refuse))
    assert {client(Job(i, "bad", "x", 3)).end for i in range(4)} == {"refused"}
    assert len(set(sent)) == 4
    bad = Job(1, "bad", "x", 3)
    assert answer(bad, httpx.Response(200, json={})).end == "error"
    assert answer(bad, httpx.Response(500, json={"error": ERROR})).end == "error"
    assert answer(bad, httpx.Response(400, json={"detail": "no"})).end == "error"


def test_metrics_are_read_by_name() -> None:
    text = (
        'outrider:num_requests_running{engine="0"} 2.0\n'
        "# TYPE outrider:request_success counter\n"
        'outrider:request_success_total{finished_reason="length"} 3.0\n'
        'outrider:request_success_total{finished_reason="abort"} 1.0\n'
    )
    found = read_metrics(text)
    assert found["num_requests_running"] == 2.0
    assert found["request_success_total"] == 4.0
    assert found["request_success_total/abort"] == 1.0
