"""T-064: what the first requests pay is not in the figures; without a warm-up the run says that they paid.

Seen red: warm-up requests kept among the samples, and no limit to the first tenth.
"""

from __future__ import annotations

import threading
import time

import pytest

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest
from outrider.benchmarking.integrity import examine
from outrider.benchmarking.run_summary import summarize
from outrider.benchmarking.runner import Load, run_load
from tests.benchmarking.test_runner import ITEMS, Toy, toy_sample

USUAL_S, FIRST_S, NUM_SLOW = 0.01, 0.1, 3


class ColdToy(Toy):
    """The first three requests take ten times as long."""

    def complete(self, request: ChatRequest) -> Sample:
        with self.lock:
            self.asked.append(request)
            seconds = FIRST_S if len(self.asked) <= NUM_SLOW else USUAL_S
        time.sleep(seconds / 10)
        return toy_sample(time.perf_counter(), seconds)


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_t064_warm_up_is_left_out_and_stored(concurrency: int) -> None:
    found = run_load(ColdToy(), ITEMS, Load(num_requests=20, concurrency=concurrency))
    summary = summarize(found)
    assert summary["e2e_latency_s"]["mean"] == pytest.approx(USUAL_S)
    assert summary["num_warmups"] >= NUM_SLOW
    assert "warm_up" not in {each.name for each in examine(found)}


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_t064_without_a_warm_up_it_warns(concurrency: int) -> None:
    found = run_load(ColdToy(), ITEMS, Load(num_requests=20, concurrency=concurrency, num_warmups=0))
    warning = next(each for each in examine(found) if each.name == "warm_up")
    assert not warning.is_fatal
    assert "10.0 times" in warning.detail
    assert threading.active_count() < 20
