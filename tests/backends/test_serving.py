"""The engine behind a thread: every request ends exactly once and says how; none takes another down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.errors import ConfigError, EngineFault, OverloadedError, RequestError
from tests.local_serving import TIMEOUT_S, Listener, serving
from tests.scripted import FixedProposer, ScriptedProposer, TableTarget, make_test_engine

COUNTING = torch.eye(5).roll(1, dims=1) * 9  # 0, 1, 2, 3, 4, 0, …
SHORT = SamplingParams(max_tokens=6)
ENDLESS = SamplingParams()
TEXTS = [[0, 1, 2, 3, 4] * 30] * 4


class GatedTarget(TableTarget):
    """Waits before each pass until the gate is open; token 3 leads to NaN if it is `faulty`."""

    def __init__(self, *, is_faulty: bool = False) -> None:
        super().__init__(COUNTING)
        self.gate, self.is_faulty = threading.Event(), is_faulty
        self.gate.set()
        self.before_pass: Callable[[], None] = lambda: None

    def forward(self, *args: Any, **options: Any) -> Any:
        assert self.gate.wait(TIMEOUT_S)
        self.before_pass()
        return super().forward(*args, **options)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return torch.where(hidden == 3, torch.nan, logits) if self.is_faulty else logits


def until(condition: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def test_requests_from_many_threads_are_answered_with_a_summary() -> None:
    with serving(make_test_engine(GatedTarget(), ScriptedProposer(TEXTS, vocab_size=5), max_seats=3)) as backend:
        listeners = [Listener() for _ in range(12)]
        threads = [threading.Thread(target=backend.submit, args=([i % 5], SHORT, listeners[i])) for i in range(12)]
        for thread in threads:
            thread.start()
        for i, listener in enumerate(listeners):
            last = listener.wait()
            assert last.finish_reason == "length"
            assert listener.token_ids == [(i + step) % 5 for step in range(1, 7)]
            assert last.summary is not None
            assert (last.summary.num_prompt_tokens, last.summary.num_output_tokens, last.summary.error) == (1, 6, None)
            assert all(chunk.summary is None for chunk in listener.chunks[:-1])
        gauges = backend.gauges()
        assert (gauges.num_waiting, gauges.num_free_pages, gauges.num_pages) == (0, 3, 3)
        assert (gauges.num_prompt_tokens, gauges.num_output_tokens) == (12, 72)
        summaries = [listener.chunks[-1].summary for listener in listeners]
        assert gauges.acceptance.num_cycles == sum(each.acceptance.num_cycles for each in summaries if each)
        for thread in threads:
            thread.join()


def test_a_request_that_can_never_run_is_refused_at_once() -> None:
    with serving(make_test_engine(GatedTarget())) as backend:
        with pytest.raises(RequestError, match="the prompt is empty"):
            backend.submit([], SHORT, Listener())
        assert backend.gauges().num_waiting == 0


def test_a_full_queue_says_when_to_come_back() -> None:
    target = GatedTarget()
    target.gate.clear()
    with serving(make_test_engine(target, max_seats=1, max_waiting=2)) as backend:
        listeners = [Listener() for _ in range(3)]
        for listener in listeners:
            backend.submit([0], SHORT, listener)
        with pytest.raises(OverloadedError, match="max_waiting=2") as caught:
            backend.submit([0], SHORT, Listener())
        assert caught.value.retry_after_s >= 1.0
        target.gate.set()
        assert [listener.wait().finish_reason for listener in listeners] == ["length"] * 3
        late = Listener()
        backend.submit([0], SHORT, late)
        assert late.wait().finish_reason == "length"


def test_cancelling_ends_a_request_wherever_it_is() -> None:
    target = GatedTarget()
    with serving(make_test_engine(target, max_seats=1)) as backend:
        running, waiting = Listener(), Listener()
        indices = [backend.submit([0], ENDLESS, running), backend.submit([1], ENDLESS, waiting)]
        assert running.started.wait(TIMEOUT_S)
        for index in reversed(indices):
            backend.cancel(index)
            backend.cancel(index)
        assert [each.wait().finish_reason for each in (running, waiting)] == ["abort", "abort"]
        assert waiting.chunks[-1].summary.num_output_tokens == 0  # type: ignore[union-attr]
        assert running.chunks[-1].summary.num_output_tokens == len(running.token_ids) > 0  # type: ignore[union-attr]
        backend.cancel(99)
        after = Listener()
        backend.submit([0], SHORT, after)
        assert after.wait().finish_reason == "length"


def test_nan_fails_its_request_only() -> None:
    engine = make_test_engine(GatedTarget(is_faulty=True), ScriptedProposer(TEXTS, vocab_size=5), max_seats=2)
    with serving(engine) as backend:
        bad, good = Listener(), Listener()
        backend.submit([2], SHORT, bad)
        backend.submit([4], SamplingParams(max_tokens=3), good)
        assert bad.wait().finish_reason == "error"
        assert "not finite" in (bad.chunks[-1].summary.error or "")  # type: ignore[union-attr]
        assert (good.wait().finish_reason, good.token_ids) == ("length", [0, 1, 2])
        assert backend.fault is None


def test_a_broken_engine_fails_every_open_request_and_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    target = GatedTarget()
    with serving(make_test_engine(target, max_seats=1)) as backend:
        listeners = [Listener(), Listener()]
        for listener in listeners:
            backend.submit([0], ENDLESS, listener)
        assert listeners[0].started.wait(TIMEOUT_S)
        target.before_pass = lambda: (_ for _ in ()).throw(RuntimeError("out of memory"))  # type: ignore[assignment]
        for listener in listeners:
            assert listener.wait().finish_reason == "error"
            assert listener.chunks[-1].summary.error == "RuntimeError: out of memory"  # type: ignore[union-attr]
        assert "out of memory" in (backend.fault or "")
        with pytest.raises(EngineFault, match=r"out of memory.*Restart"):
            backend.submit([0], SHORT, Listener())
        assert backend.gauges().num_free_pages == backend.gauges().num_pages
    assert "The engine failed" in caplog.text


def test_a_listener_that_raises_loses_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    def gone(chunk: object) -> None:
        raise ConnectionError("gone")

    with serving(make_test_engine(GatedTarget(), max_seats=2)) as backend:
        good = Listener()
        backend.submit([0], ENDLESS, gone)
        backend.submit([0], SHORT, good)
        assert good.wait().finish_reason == "length"
        until(lambda: backend.gauges().num_running + backend.gauges().num_waiting == 0)
    assert "whoever listened failed" in caplog.text


def test_stopping_drains_then_aborts() -> None:
    target = GatedTarget()
    with serving(make_test_engine(target, max_seats=1)) as backend:
        short, endless = Listener(), Listener()
        backend.submit([0], SHORT, short)
        assert short.started.wait(TIMEOUT_S)
        target.before_pass = lambda: time.sleep(0.01)
        backend.submit([0], ENDLESS, endless)
        backend.stop(drain_s=0.5)
        assert [each.wait().finish_reason for each in (short, endless)] == ["length", "abort"]
        with pytest.raises(OverloadedError, match="about to stop"):
            backend.submit([0], SHORT, Listener())
        with pytest.raises(ConfigError, match="started before"):
            backend.start()


def test_draining_waits_no_longer_than_it_must() -> None:
    with serving(make_test_engine(GatedTarget())) as backend:
        listener = Listener()
        backend.submit([0], SHORT, listener)
        began = time.monotonic()
        backend.stop(drain_s=TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S / 2
        assert listener.wait().finish_reason == "length"


def test_before_the_start_nothing_is_taken() -> None:
    with serving(make_test_engine(GatedTarget()), is_started=False) as backend, pytest.raises(OverloadedError):
        backend.submit([0], SHORT, Listener())


def test_it_says_whether_it_drafts() -> None:
    with serving(make_test_engine(GatedTarget(), ScriptedProposer(TEXTS, vocab_size=5))) as backend:
        before = backend.speculation()
        assert (before.is_active, before.drafter, before.num_speculative_tokens) == (False, "scripted", 4)
        assert before.reason == "no draft has been verified yet"
        listener = Listener()
        backend.submit([0], replace(SHORT, max_tokens=20), listener)
        listener.wait()
        assert backend.speculation().is_active
        assert backend.speculation().reason is None


@pytest.mark.parametrize(("settings", "reason"), [(None, "no drafter"), ({"num_speculative_tokens": 0}, "is 0")])
def test_it_says_why_it_does_not_draft(settings: dict[str, int] | None, reason: str) -> None:
    proposer = None if settings is None else FixedProposer(torch.ones(5))
    with serving(make_test_engine(GatedTarget(), proposer, **(settings or {}))) as backend:
        listener = Listener()
        backend.submit([0], SHORT, listener)
        listener.wait()
        assert reason in (backend.speculation().reason or "")
        assert not backend.speculation().is_active
