"""T-061: a pass of the engine fails: an error in both modes; without its drafter it only gets slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from outrider.backends.local import LLM
from outrider.backends.scripted import byte_tokenizer
from outrider.backends.serving import LocalServing
from outrider.engine.proposer import FencedProposer
from tests.scripted import ScriptedProposer, TableTarget, make_test_engine
from tests.serving import Served, events, serve_backend

ALPHABET = torch.eye(byte_tokenizer().vocab_size).roll(1, dims=1) * 9  # after a comes b, after b comes c, …
PASSES = {"prefill": 1, "first verify": 2, "third verify": 4}
BODY = {"prompt": "a", "max_tokens": 20, "temperature": 0, "stream_options": {"include_usage": True}}
TEXT = "bcdefghijklmnopqrstu"


class FailingTarget(TableTarget):
    """Fails in one pass, counted from 1; 0 means never."""

    def __init__(self, failing_pass: int) -> None:
        super().__init__(ALPHABET)
        self.failing_pass = failing_pass

    def forward(self, *args: Any, **options: Any) -> Any:
        if len(self.passes) + 1 == self.failing_pass:
            raise RuntimeError("the pass broke")
        return super().forward(*args, **options)


class FailingProposer(ScriptedProposer):
    """Drafts as it should in its first passes, then fails."""

    num_good = 2

    def propose(self, *args: Any) -> Any:
        if len(self.asked) == self.num_good:
            raise RuntimeError("the drafter broke")
        return super().propose(*args)


@contextmanager
def engine_served(*, failing_pass: int = 0, proposer: type[ScriptedProposer] = ScriptedProposer) -> Iterator[Served]:
    tokenizer = byte_tokenizer()
    text = [tokenizer.bos_id, *b"a", *TEXT.encode()]
    drafter = proposer([text] * 2, script=(3, 1), vocab_size=len(ALPHABET), tap_layers=())
    engine = make_test_engine(FailingTarget(failing_pass), FencedProposer(drafter), tokenizer=tokenizer, max_seats=2)
    with serve_backend(LocalServing(LLM(engine, tokenizer), model="toy")) as served:
        yield served


@pytest.mark.parametrize("where", PASSES)
def test_a_failed_pass_is_a_server_error(where: str) -> None:
    with engine_served(failing_pass=PASSES[where]) as served:
        answered = served.post("/v1/completions", BODY)
        assert answered.status_code == 500
        assert "the pass broke" in answered.json()["error"]["message"]
        assert served.http.get("/health").json()["status"] == "failed"
        assert served.post("/v1/completions", BODY).status_code >= 500


@pytest.mark.parametrize("where", PASSES)
def test_a_failed_pass_ends_a_stream_with_its_error(where: str) -> None:
    with engine_served(failing_pass=PASSES[where]) as served:
        streamed = served.post("/v1/completions", {**BODY, "stream": True})
        if where == "prefill":  # nothing was sent yet, so the status can still tell
            assert streamed.status_code == 500
            return
        shown = events(streamed)
        assert "the pass broke" in shown[-1]["error"]["message"]
        assert "[DONE]" not in shown
        assert "".join(each["choices"][0]["text"] for each in shown[:-1]) == TEXT[: 1 if where == "first verify" else 7]
        assert all(each["choices"][0]["finish_reason"] is None for each in shown[:-1])
        assert all(each["usage"] is None for each in shown[:-1])


def test_a_failed_drafter_fails_no_request() -> None:
    with engine_served(proposer=FailingProposer) as served:
        for _ in range(2):
            body = served.post("/v1/completions", BODY).json()
            assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (TEXT, "length")
        assert served.http.get("/health").json()["status"] == "ready"
        shown = served.http.get("/v1/speculation").json()
        assert shown["active"] is False
        assert "the drafter broke" in shown["reason"]
        assert body["metrics"] == {"speculative_decoding": None}
