from __future__ import annotations

import pytest

from outrider.benchmarking.steadiness import Limits, Run, judge

TIMES_S = [float(second) for second in range(20)]
LEVEL = [100.0] * 20


def test_figures_are_those_of_the_whole_run() -> None:
    rising = [100.0 + second for second in TIMES_S]
    verdict = judge(Run(times_s=TIMES_S, memory_bytes=rising))
    assert verdict.figures["memory_growth"] == pytest.approx(19 / 109.5)
    assert verdict.figures["memory_growth_error"] == pytest.approx(0.0, abs=1e-9)
    assert verdict.figures["memory_step"] == pytest.approx(0.15)  # to 115, where the last five begin
    assert set(verdict.faults) == {"memory_growth", "memory_step"}
    assert judge(Run(times_s=TIMES_S, memory_bytes=rising), Limits(max_memory_growth=0.2)).faults == ()


def test_a_rise_that_may_be_noise_is_none() -> None:
    noisy = [100.0, 110.0] * 10
    figures = judge(Run(times_s=TIMES_S, memory_bytes=noisy)).figures
    assert 0.01 <= figures["memory_growth"] < 3 * figures["memory_growth_error"]
    assert judge(Run(times_s=TIMES_S, memory_bytes=noisy)).faults == ()


@pytest.mark.parametrize("last", [1.8, 2.2])
def test_acceptance_may_drift_neither_way(last: float) -> None:
    run = Run(times_s=TIMES_S, memory_bytes=LEVEL, acceptance_lengths=[2.0] * 15 + [last] * 5)
    assert judge(run).faults == ("acceptance_drift",)
    assert judge(run).figures["acceptance_drift"] == pytest.approx(0.1)
    assert judge(run, Limits(max_acceptance_drift=0.2)).faults == ()


def test_memory_that_nobody_could_read_is_not_judged() -> None:
    verdict = judge(Run(times_s=(), memory_bytes=(), tokens_per_s=[100.0] * 10 + [90.0] * 5))
    assert verdict.faults == ("speed_retention",)
    assert verdict.figures.keys() == {"speed_retention", "num_errors", "num_empty"}
