from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.benchmarking import soak
from outrider.benchmarking.phases import find_phases

SEED_003 = (221, 214, 218, 222, 230, 103, 59, 62, 62, 212)
noises = st.floats(0.0, 0.03)
seeds = st.integers(0, 10_000)


def noisy(levels: list[float], noise: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [level * math.exp(draw.gauss(0.0, noise)) for level in levels]


def spans(rates: list[float] | tuple[float, ...]) -> list[tuple[str, int, int]]:
    return [(phase.name, phase.first, phase.last) for phase in find_phases(rates).phases]


def test_ten_published_requests() -> None:
    found = find_phases(SEED_003)
    named = [("fast", 1, 5), ("transition", 6, 6), ("degraded", 7, 9), ("recovered", 10, 10)]
    assert spans(SEED_003) == named
    assert [phase.tokens_per_s for phase in found.phases] == pytest.approx([221, 103, 62, 212])
    assert (found.period, found.is_cycle) == (None, False)
    assert soak.find_phases is find_phases


def test_two_periods_are_a_cycle_and_fewer_are_none() -> None:
    assert find_phases(SEED_003 * 2).period == 10
    assert find_phases(SEED_003 * 3).intervals == (10,) * 4
    assert find_phases(SEED_003[:9] * 2).period == 9
    assert not find_phases((SEED_003 * 2)[:17]).is_cycle


def test_falls_at_odd_times_are_no_cycle() -> None:
    levels = [200.0] * 5 + [60.0] * 3 + [200.0] * 12 + [60.0] * 2 + [200.0] * 4 + [60.0] * 6 + [200.0] * 5
    found = find_phases(levels)
    assert (len(found.degraded), found.period) == (3, None)


def test_levels_between_have_phases_of_their_own() -> None:
    rates = [200.0] * 8 + [140.0] * 8 + [60.0] * 8 + [200.0] * 8
    assert spans(rates) == [("fast", 1, 8), ("degraded", 9, 16), ("degraded", 17, 24), ("recovered", 25, 32)]


def test_a_run_may_begin_slow() -> None:
    assert spans([60.0] * 6 + [200.0] * 6) == [("degraded", 1, 6), ("fast", 7, 12)]


def test_a_fall_while_it_drifts_is_measured_by_what_was_fast_of_late() -> None:
    levels = [200 * 0.985**at * (0.4 if 20 <= at < 25 else 1.0) for at in range(45)]
    assert spans(levels) == [("fast", 1, 20), ("degraded", 21, 25), ("recovered", 26, 45)]


CLIMBING = [0.8, 0.88, 1.02, 0.9, 1.0, 0.86, 0.92, 0.5, 0.39, 0.31, 0.35, 0.45, 0.43, 0.64, 0.53, 0.78, 1.0, 0.74, 1.06]
CLIMBED = [
    0.76,
    1.09,
    0.8,
    0.97,
    1.05,
    0.75,
    0.77,
    0.71,
    0.97,
    1.0,
    0.9,
    1.0,
    1.15,
    1.0,
    0.9,
    1.0,
    1.07,
    1.13,
    1.05,
    1.0,
]


def test_a_fall_that_climbs_back_without_a_jump_ends_where_it_is_back() -> None:
    """Of a soak on a busy machine."""
    phases = find_phases(CLIMBING + CLIMBED).phases
    assert [(phase.name, phase.first, phase.last) for phase in phases] == [
        ("fast", 1, 7),
        ("degraded", 8, 16),
        ("recovered", 17, 39),
    ]
    assert phases[1].tokens_per_s < 0.5 < 0.9 < phases[2].tokens_per_s


def test_speeds_may_be_any_sequence_of_numbers() -> None:
    assert find_phases(np.array([221, 214, 218, 222, 230, 103, 59, 62, 62, 212])).phases[2].name == "degraded"
    with pytest.raises(ValueError, match="speeds above 0"):
        find_phases([1.0, None])  # type: ignore[list-item]


def test_steep_drift_is_no_phase() -> None:
    assert spans(noisy([200 * (1 - 0.8 * at / 50) for at in range(50)], 0.01, 1)) == [("steady", 1, 50)]


@pytest.mark.parametrize("rates", [(), (100.0,), (100.0, 10.0, 100.0, 10.0, 100.0)])
def test_few_requests_are_one_phase(rates: tuple[float, ...]) -> None:
    assert spans(rates) == ([("steady", 1, len(rates))] if rates else [])


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_a_speed_is_above_zero(wrong: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        find_phases([100.0, wrong])


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 100), noises, st.floats(0.1, 10_000.0), seeds)
def test_noise_is_one_phase(num_requests: int, noise: float, level: float, seed: int) -> None:
    assert spans(noisy([level] * num_requests, noise, seed)) == [("steady", 1, num_requests)]


@settings(max_examples=40, deadline=None)
@given(st.integers(20, 100), st.floats(-0.5, 1.0), noises, seeds)
def test_drift_is_no_phase(num_requests: int, change: float, noise: float, seed: int) -> None:
    levels = [100 * (1 + change * at / num_requests) for at in range(num_requests)]
    assert spans(noisy(levels, noise, seed)) == [("steady", 1, num_requests)]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(7, 16), st.floats(0.5, 0.8), noises, seeds)
def test_planted_cycles_are_found(data: st.DataObject, period: int, depth: float, noise: float, seed: int) -> None:
    num_slow, num_periods = data.draw(st.integers(2, period // 2)), data.draw(st.integers(2, 4))
    is_slow = [at % period >= period - num_slow for at in range(period * num_periods)]
    found = find_phases(noisy([200 * (1 - depth * slow) for slow in is_slow], noise, seed))
    assert found.period == period
    assert [(phase.first, phase.last) for phase in found.degraded] == [
        (period * cycle - num_slow + 1, period * cycle) for cycle in range(1, num_periods + 1)
    ]
