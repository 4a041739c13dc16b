from __future__ import annotations

import socket
from collections.abc import Iterator

import openai
import pytest

from outrider.backends.scripted import Script, Step
from outrider.errors import OverloadedError
from tests.serving import MODEL, Served, events, eventually, serve

SCRIPTS = {
    "endless": Script((Step((97,), delay_s=0.002),), repeats=True),
    "silent": Script((Step((), delay_s=0.002),), repeats=True),
    "half": Script((Step((97, 98)), Step((99,))), error="logits are not finite"),
    "nothing": Script((Step(()),), error="the engine stopped"),
    "full": Script((), refusal=OverloadedError("The queue of 8 is full.", retry_after_s=2.2)),
    "": Script.of_text("fine"),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(SCRIPTS, context_length=10**6, max_seats=8) as served:
        yield served


def last_reason(served: Served) -> str | None:
    return served.backend.finish_reasons.get(len(served.backend.submitted) - 1)


@pytest.mark.parametrize("prompt", ["endless", "silent"])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_ends_its_request(served: Served, prompt: str, stream: str) -> None:
    before = len(served.backend.submitted)
    body = f'{{"prompt": "{prompt}", "max_tokens": 900000, "stream": {stream}, "n": 2}}'.encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        eventually(lambda: len(served.backend.submitted) == before + 2)
        if prompt == "endless" and stream == "true":
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert served.backend.gauges().num_running == 2
    eventually(lambda: served.backend.gauges().num_running == 0)
    assert {served.backend.finish_reasons[before], served.backend.finish_reasons[before + 1]} == {"abort"}
    assert served.post("/v1/completions", {"prompt": "hi"}).status_code == 200


def test_a_client_may_close_its_stream(served: Served) -> None:
    stream = served.sdk.completions.create(model=MODEL, prompt="endless", max_tokens=900000, stream=True)
    next(iter(stream))
    stream.close()
    eventually(lambda: last_reason(served) == "abort")


def test_a_failure_before_the_first_token_is_a_500(served: Served) -> None:
    for stream in (True, False):
        answered = served.post("/v1/completions", {"prompt": "nothing", "stream": stream})
        assert answered.status_code == 500
        error = answered.json()["error"]
        assert (error["message"], error["type"], error["code"]) == (
            "the engine stopped",
            "server_error",
            "engine_error",
        )


def test_a_failure_half_way_is_an_event_that_clients_raise(served: Served) -> None:
    shown = events(served.post("/v1/completions", {"prompt": "half", "stream": True}))
    assert shown[0]["choices"][0]["text"] == "ab"
    assert shown[-1]["error"]["message"] == "logits are not finite"
    assert all(choice["finish_reason"] is None for each in shown[:-1] for choice in each["choices"])
    stream = served.sdk.completions.create(model=MODEL, prompt="half", stream=True)
    with pytest.raises(openai.APIError, match="not finite"):
        list(stream)
    answered = served.post("/v1/completions", {"prompt": "half"})
    assert answered.status_code == 500


def test_one_failure_takes_its_siblings_but_nobody_else(served: Served) -> None:
    with served.http.stream("POST", "/v1/completions", json={"prompt": "endless", "stream": True, "max_tokens": 9000}):
        other = len(served.backend.submitted) - 1
        prompts = ["half", "endless"]
        assert served.post("/v1/completions", {"prompt": prompts, "max_tokens": 9000}).status_code == 500
        eventually(lambda: last_reason(served) == "abort")
        assert other not in served.backend.finish_reasons


def test_a_full_queue_is_429_with_a_time(served: Served) -> None:
    answered = served.post("/v1/completions", {"prompt": "full", "stream": True})
    assert (answered.status_code, answered.headers["retry-after"]) == (429, "3")
    assert answered.json()["error"]["type"] == "rate_limit_error"
    with pytest.raises(openai.RateLimitError):
        served.sdk.completions.create(model=MODEL, prompt="full")


def test_a_refusal_takes_back_what_was_queued_before_it(served: Served) -> None:
    before = len(served.backend.submitted)
    answered = served.post("/v1/completions", {"prompt": ["endless", "full"], "max_tokens": 900000})
    assert answered.status_code == 429
    eventually(lambda: served.backend.finish_reasons.get(before) == "abort")


def test_stopping_tells_clients_who_still_wait() -> None:
    with serve(SCRIPTS, context_length=10**6) as served:
        stream = served.sdk.completions.create(model=MODEL, prompt="endless", max_tokens=900000, stream=True)
        chunks = iter(stream)
        next(chunks)
        served.app.state.readiness.drain(0.0)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
        refused = served.post("/v1/completions", {"prompt": "hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
