"""Loads over a toy that answers at once, then over HTTP against a server whose truth is planted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from outrider.backends.planted import Pace, Planted
from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest, ServerClient, ServerKind
from outrider.benchmarking.integrity import examine
from outrider.benchmarking.request_sets import Item, RequestSet
from outrider.benchmarking.run_summary import summarize
from outrider.benchmarking.runner import Load, Run, poisson_arrivals, run_load
from outrider.errors import ConfigError
from tests.serving import eventually, serve

ITEMS = RequestSet("toy", tuple(Item(prompt=f"prompt {number}") for number in range(4)))


class Toy:
    """An asker that notes what it was asked, and answers one token after a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.asked, self.num_running, self.most_running = seconds, [], 0, 0
        self.lock = threading.Lock()

    def complete(self, request: ChatRequest) -> Sample:
        started_s = time.perf_counter()
        with self.lock:
            self.asked.append(request)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        time.sleep(self.seconds)
        with self.lock:
            self.num_running -= 1
        return toy_sample(started_s, time.perf_counter() - started_s)

    def metrics_text(self) -> str:
        return ""

    def server_kind(self) -> ServerKind:
        return "unknown"


def toy_sample(started_s: float = 0.0, e2e_s: float = 1.0, **changes: Any) -> Sample:
    sample = Sample(
        started_s=started_s,
        ttft_s=e2e_s / 2,
        chunk_gaps_s=(e2e_s / 2,),
        e2e_s=e2e_s,
        num_prompt_tokens=10,
        num_output_tokens=11,
        num_chunks=2,
        text="x",
        reasoning="",
        tool_calls=(),
        finish_reason="length",
        error=None,
        acceptance=None,
        num_first_tokens=1,
    )
    return replace(sample, **changes)


def test_a_closed_loop_keeps_so_many_in_flight_and_drops_warm_ups() -> None:
    toy, done = Toy(0.01), []
    found = run_load(toy, ITEMS, Load(num_requests=12, concurrency=3), progress=lambda: done.append(1))
    assert toy.most_running == 3
    assert (len(found.samples), len(toy.asked), len(done)) == (12, 18, 18)
    prompts = [each.prompt for each in toy.asked]
    assert len(set(prompts)) == 18  # warm-ups have prompts of their own, repeats too
    assert found.samples[0].started_s > 0


def test_seeds_make_prompts_the_same_and_no_seed_makes_them_new() -> None:
    def prompts(**options: Any) -> list[str | None]:
        toy = Toy()
        run_load(toy, ITEMS, Load(num_requests=5, **options))
        return [each.prompt for each in toy.asked]

    assert prompts(seed=3) == prompts(seed=3)
    assert not set(prompts()) & set(prompts())
    bare = prompts(is_salted=False, num_warmups=0)
    assert bare == [f"prompt {number}" for number in (0, 1, 2, 3, 0)]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    toy = Toy(0.2)
    found = run_load(toy, ITEMS, Load(num_requests=10, request_rate=200.0, num_warmups=0, seed=1))
    sent = [sample.started_s for sample in found.samples]
    expected = poisson_arrivals(10, 200.0, 1)
    assert toy.most_running > 3
    assert [at - sent[0] for at in sent] == pytest.approx(expected, abs=0.05)
    assert found.arrival_lag_s is not None


def test_arrivals_are_poisson_and_seeded() -> None:
    arrivals = poisson_arrivals(20_000, 5.0, 1)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    mean = fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert fmean((gap - mean) ** 2 for gap in gaps) ** 0.5 == pytest.approx(0.2, rel=0.04)  # exponential: σ = mean
    assert arrivals[0] == 0
    assert poisson_arrivals(9, 5.0, 2) != poisson_arrivals(9, 5.0, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"num_requests": 0}, {"concurrency": 0}, {"request_rate": 0.0}, {"max_tokens": 0}, {"expected_cached_share": 2.0}],
)
def test_a_load_that_asks_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Load(**wrong)


PLAN = Planted(acceptance_by_position=(0.8, 0.6, 0.4, 0.2), step_s=0.006, draft_token_s=0.0005, prefill_s=0.06)


@contextmanager
def planted(plan: Planted, **options: Any) -> Iterator[ServerClient]:
    with serve({"": plan}, sleep=Pace(), context_length=4096, **options) as served:
        client = ServerClient(served.url)
        yield client
        client.close()


def measured(plan: Planted, *, num_requests: int, **load: Any) -> Run:
    with planted(plan) as client:
        return run_load(client, ITEMS, Load(num_requests=num_requests, **load))


def check_truth(run: Run, plan: Planted, *, rel: float, acceptance_abs: float) -> None:
    """Counts exactly, rates within the error of so few steps, times within what the client was late by, and `rel`."""
    found = summarize(run, findings=())
    assert found["num_output_tokens"] == run.load.num_requests * run.load.max_tokens
    assert found["counted_tokens_per_s"] == pytest.approx(found["output_tokens_per_s"])
    assert found["acceptance_by_position"] == pytest.approx(plan.acceptance_by_position, abs=acceptance_abs)
    assert found["mean_acceptance_length"] == pytest.approx(plan.acceptance_length(), abs=2 * acceptance_abs)
    assert found["acceptance_rate"] == pytest.approx(sum(plan.acceptance_by_position) / 4, abs=acceptance_abs)
    assert found["fire_rate_steps"] == pytest.approx(1.0, abs=0.03)
    assert found["fire_rate_requests"] == 1.0
    lag_s = 0.03 + run.client_lag_s  # a request through both HTTP stacks of one busy process
    assert plan.prefill_s <= found["ttft_s"]["p50"] < plan.prefill_s + lag_s
    assert found["tpot_s"]["p50"] == pytest.approx(1 / plan.tokens_per_s(), rel=rel)
    assert found["chunk_gap_s"]["mean"] == pytest.approx(plan.cycle_s(4), rel=rel)
    assert found["decode_tokens_per_s"]["p50"] == pytest.approx(plan.tokens_per_s(), rel=rel)
    whole_s = plan.prefill_s + (run.load.max_tokens - 1) / plan.tokens_per_s()
    assert found["e2e_latency_s"]["p50"] == pytest.approx(whole_s, rel=rel, abs=lag_s)


def test_every_figure_is_the_planted_one_within_its_error() -> None:
    run = measured(PLAN, num_requests=8, max_tokens=60, num_warmups=1)
    check_truth(run, PLAN, rel=0.08, acceptance_abs=0.04)
    assert {each.name for each in examine(run) if each.is_fatal} <= {"client_bound"}  # a busy machine may be


@pytest.mark.slow
def test_every_figure_is_the_planted_one_within_a_smaller_error() -> None:
    run = measured(PLAN, num_requests=40, max_tokens=200, num_warmups=2)
    check_truth(run, PLAN, rel=0.03, acceptance_abs=0.01)


def test_drafts_that_a_request_turns_off_are_off() -> None:
    run = measured(PLAN, num_requests=3, max_tokens=30, num_warmups=0, extra={"speculative": {"enabled": False}})
    found = summarize(run)
    assert found["mean_acceptance_length"] is None
    assert found["decode_tokens_per_s"]["p50"] == pytest.approx(1 / PLAN.step_s, rel=0.08)
    assert "not_drafted" in {each.name for each in examine(run)}


def test_losses_are_counted_and_spoil_the_run() -> None:
    run = measured(replace(PLAN, step_s=0.001, lost_every=4), num_requests=8, max_tokens=12, num_warmups=0)
    found = summarize(run)
    assert (found["num_failed"], found["completed"], found["num_output_tokens"]) == (2, 6, 72)
    assert found["integrity"]["status"] == "invalid"
    assert "request_errors" in {each.name for each in examine(run)}
    assert "other_tenant" not in {each.name for each in examine(run)}


def test_drift_and_cycle_show_in_the_rows() -> None:
    plan = Planted(step_s=0.003, drift=0.5, cycle=(1.0, 3.0))
    run = measured(plan, num_requests=4, max_tokens=20, num_warmups=0)
    rates = [sample.tokens_per_s or 0 for sample in run.samples]
    factors = [rates[0] / rate for rate in rates]
    assert factors == pytest.approx([1.0, 4.5, 2.0, 7.5], rel=0.1)


def test_concurrent_requests_share_the_planted_speed() -> None:
    plan = Planted(step_s=0.003)
    found = summarize(measured(plan, num_requests=8, max_tokens=20, num_warmups=0, concurrency=4))
    assert found["output_tokens_per_s"] == pytest.approx(1 / 0.003, rel=0.15)


def test_another_tenant_is_seen() -> None:
    with planted(replace(PLAN, step_s=0.002, prefill_s=0.0)) as client:
        other = ChatRequest(prompt="someone else", max_tokens=300)
        thread = threading.Thread(target=client.complete, args=(other,))
        load = Load(num_requests=3, max_tokens=12, num_warmups=0)
        thread.start()
        time.sleep(0.05)
        run = run_load(client, ITEMS, load)
        thread.join()
        # whether it ran before, meanwhile or after: in each case it is not ours
        assert run.counted is not None
        before = {each.name for each in examine(run)}
        busy = run_load(_Interrupting(client), ITEMS, load)
    assert "other_tenant" in {each.name for each in examine(busy)}
    assert before <= {"client_bound", "other_tenant", "warm_up"}


class _Interrupting:
    """A client whose server gets a request of somebody else's with each of ours."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        self.metrics_text, self.server_kind = client.metrics_text, client.server_kind

    def complete(self, request: ChatRequest) -> Sample:
        self.client.complete(ChatRequest(prompt="someone else", max_tokens=5))
        return self.client.complete(request)


class Stopping(Toy):
    """The third answer stops the run while those after it hang."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()

    def complete(self, request: ChatRequest) -> Sample:
        answered = super().complete(request)
        place = self.asked.index(request)
        if place == 2:
            eventually(lambda: len(self.asked) == 4)
            raise KeyboardInterrupt
        if place > 2:
            self.is_over.wait(10)
        return answered


def test_a_run_that_is_stopped_hands_over_what_was_answered_and_waits_for_nothing() -> None:
    toy, kept, began_s = Stopping(), list[Run](), time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_load(toy, ITEMS, Load(num_requests=8, concurrency=2, num_warmups=0), keep=kept.append)
    assert time.perf_counter() - began_s < 8
    toy.is_over.set()
    (run,) = kept
    assert (len(run.samples), run.was_stopped, len(toy.asked) < 8) == (2, True, True)
    assert [each.name for each in examine(run)] == ["stopped"]
    assert summarize(run)["integrity"]["status"] == "invalid"
