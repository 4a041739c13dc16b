"""T-061: an engine that fails gives an error in both modes, never an answer that looks finished."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.backends.scripted import Script, Step
from tests.serving import Served, events, serve

SCRIPTS = {
    "prefill": Script((Step(()),), error="failed"),
    "first": Script((Step((97,)), Step(())), error="failed"),
    "third": Script((Step((97,)), Step((98,)), Step((99,)), Step(())), error="failed"),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(SCRIPTS) as served:
        yield served


@pytest.mark.parametrize("where", SCRIPTS)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_failure_is_visible_in_both_modes(served: Served, where: str, path: str) -> None:
    body = {
        "prompt": where,
        "messages": [{"role": "user", "content": where}],
        "stream_options": {"include_usage": True},
    }
    whole = served.post(f"/v1/{path}", body)
    assert whole.status_code == 500
    assert whole.json()["error"]["message"] == "failed"
    streamed = served.post(f"/v1/{path}", {**body, "stream": True})
    if where == "prefill":  # nothing was sent yet, so the status can still tell
        assert streamed.status_code == 500
        return
    shown = events(streamed)
    assert shown[-1]["error"]["message"] == "failed"
    assert "[DONE]" not in shown
    assert all(choice["finish_reason"] is None for each in shown[:-1] for choice in each["choices"])
    assert all(each["usage"] is None for each in shown[:-1])
