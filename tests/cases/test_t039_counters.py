"""T-039: skipped rounds propose nothing, figures without data are absent, a round without a token is a fault.

Seen red: the engine without its check of a negative count.
"""

from __future__ import annotations

from dataclasses import astuple
from itertools import pairwise
from typing import Any

import pytest
import torch

from outrider import metrics
from outrider.backends.base import Gauges
from outrider.core import SamplingParams
from outrider.engine import engine as engine_module
from outrider.engine.cycle import run_cycle
from tests.local_serving import Listener, serving
from tests.scripted import ScriptedProposer, TableTarget, make_test_engine

COUNTING = TableTarget(torch.eye(5).roll(1, dims=1) * 9)
TEXTS = [[0, 1, 2, 3, 4] * 30] * 4


def counters(gauges: Gauges) -> tuple[int, ...]:
    stats = gauges.acceptance
    counts = (gauges.num_prompt_tokens, gauges.num_output_tokens, gauges.num_preemptions, gauges.num_cached_tokens)
    return (*counts, *astuple(stats)[:3])


def test_t039_counts_without_drafts_and_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_test_engine(COUNTING, ScriptedProposer(TEXTS, vocab_size=5))
    emptied: list[int] = []

    def cycle(batch: Any, **options: Any) -> Any:
        result = run_cycle(batch, **options)
        for row, seed in enumerate(batch.noise_seeds):
            if seed == 666 and batch.host_positions[row] > 2:
                result.judged.verdict.num_accepted_tokens[row] = -1
                emptied.append(row)
        return result

    monkeypatch.setattr(engine_module, "run_cycle", cycle)
    with serving(engine) as backend:
        scrapes = [backend.gauges()]
        assert metrics.acceptance_rate(scrapes[0].acceptance) is None
        for params in (SamplingParams(max_tokens=9, num_speculative_tokens=0), SamplingParams(max_tokens=1)):
            listener = Listener()
            backend.submit([0], params, listener)
            assert listener.wait().finish_reason == "length"
            scrapes.append(backend.gauges())
        assert scrapes[-1].acceptance.num_draft_tokens == scrapes[-1].acceptance.num_cycles == 0
        assert metrics.acceptance_rate(scrapes[-1].acceptance) is None
        listeners = [Listener() for _ in range(3)]
        for seed, listener in zip((1, 666, 3), listeners, strict=True):
            backend.submit([0], SamplingParams(max_tokens=100, seed=seed), listener)
            scrapes += [backend.gauges() for _ in range(15)]
        lasts = [listener.wait() for listener in listeners]
        scrapes += [backend.gauges() for _ in range(5)]
    assert [last.finish_reason for last in lasts] == ["length", "error", "length"]
    assert "no token" in (lasts[1].summary.error or "")  # type: ignore[union-attr]
    assert len(emptied) == 1
    assert len(scrapes) >= 50
    for before, after in pairwise(scrapes):
        assert all(one <= other for one, other in zip(counters(before), counters(after), strict=True))
