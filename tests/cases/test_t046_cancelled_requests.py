"""T-046: whoever goes away, at whatever moment, frees seat and pages within a round, and nothing more is delivered.

Seen red: Scheduler.remove leaving out space.release.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from outrider.core import SamplingParams
from outrider.engine import engine as engine_module
from outrider.engine.batch import CycleBatch
from outrider.engine.cycle import CycleResult, run_cycle
from tests.local_serving import TIMEOUT_S, Listener, serving
from tests.paged import paged_engine
from tests.toy import reference_greedy, toy_drafter, toy_target

TARGET = toy_target()
PROMPT = [(11 * i + 5) % 95 for i in range(20)]  # three chunks
NUM_TOKENS = 6
ANSWER = reference_greedy(TARGET, PROMPT[:9], NUM_TOKENS)


@pytest.mark.parametrize("moment", ["prefill", "first chunk", "draft"])
def test_t046_nothing_is_left_of_a_cancelled_request(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = toy_drafter(TARGET)
    engine, kv_cache = paged_engine(TARGET, drafter)
    num_free, num_cycles = kv_cache.num_free_pages, 0
    indices: list[int] = []
    in_cycle = threading.Event()

    def cycle(batch: CycleBatch, **options: Any) -> CycleResult:
        nonlocal num_cycles
        num_cycles += 1
        if moment == "draft" and indices:
            backend.cancel(indices[-1])
            in_cycle.set()
        return run_cycle(batch, **options)

    monkeypatch.setattr(engine_module, "run_cycle", cycle)
    with serving(engine) as backend:
        for _ in range(14):
            listener = Listener()
            indices.append(backend.submit(PROMPT, SamplingParams(), listener))
            if moment == "first chunk":
                assert listener.started.wait(TIMEOUT_S)
            if moment == "draft":
                assert in_cycle.wait(TIMEOUT_S)
                in_cycle.clear()
            before = num_cycles
            backend.cancel(indices[-1])
            last = listener.wait()
            assert last.finish_reason == "abort"
            assert last.summary is not None
            assert last.summary.num_output_tokens == len(listener.token_ids)
            assert num_cycles - before <= 2
            gauges = backend.gauges()
            assert (gauges.num_running, gauges.num_waiting, gauges.num_free_pages) == (0, 0, num_free)
        indices.clear()
        after = Listener()
        backend.submit(PROMPT[:9], SamplingParams(max_tokens=NUM_TOKENS), after)
        after.wait()
        assert after.token_ids == ANSWER
    kv_cache.assert_consistent()
    assert not any(pages for group in kv_cache.groups for pages in group.pages)
