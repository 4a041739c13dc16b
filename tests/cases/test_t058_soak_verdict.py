"""T-058: a soak is judged by a line through all its samples, by steps, speed, errors and empty answers."""

from __future__ import annotations

import random

import pytest

from outrider.benchmarking.steadiness import Run, judge

MINUTES = range(240)
WARM_UP = 30


def noise(seed: int = 0, *, deviation: float = 3.0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(0.0, deviation) for _ in MINUTES]


FLAT = [500 + each for each in noise()]
SLOPING = [500 + 0.05 * minute + each for minute, each in zip(MINUTES, noise(), strict=True)]
SAW_TOOTH = [500 + 40 * (minute % 30) / 30 + each for minute, each in zip(MINUTES, noise(deviation=0.5), strict=True)]
STEPPED = [value + 20 * (minute >= 20) for minute, value in zip(MINUTES, FLAT, strict=True)]
SLOWING = [100 * (1 - 0.05 * minute / 239) for minute in MINUTES]


def faults(memory: list[float], *, warm_up: int = WARM_UP, speed: list[float] | None = None, **counts: int) -> set[str]:
    speeds = [] if speed is None else speed[warm_up:]
    times_s = [60.0 * minute for minute in MINUTES][warm_up:]
    return set(judge(Run(times_s=times_s, memory_bytes=memory[warm_up:], tokens_per_s=speeds, **counts)).faults)


@pytest.mark.parametrize("seed", range(20))
def test_noise_passes(seed: int) -> None:
    assert faults([500 + each for each in noise(seed)], speed=[100.0] * 240) == set()


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_slope_fails(seed: int) -> None:
    sloping = [500 + 0.05 * minute + each for minute, each in zip(MINUTES, noise(seed), strict=True)]
    assert "memory_growth" in faults(sloping)
    figures = judge(Run(times_s=[60.0 * minute for minute in MINUTES], memory_bytes=sloping)).figures
    assert 13 < figures["memory_growth"] / figures["memory_growth_error"] < 22


def test_a_slope_is_found_though_the_ends_are_level() -> None:
    assert "memory_growth" in faults([*SLOPING[:-1], SLOPING[WARM_UP]])
    assert faults([*FLAT[:-1], 520.0]) == set()  # and the other way round


def test_a_saw_tooth_that_returns_passes() -> None:
    assert faults(SAW_TOOTH) == set()


def test_a_step_counts_after_the_warm_up_alone() -> None:
    assert faults(STEPPED, warm_up=30) == set()
    assert "memory_step" in faults(STEPPED, warm_up=10)


def test_speed_that_falls_fails() -> None:
    assert faults(FLAT, speed=SLOWING) == {"speed_retention"}


def test_empty_answers_and_errors_fail() -> None:
    assert faults(FLAT, num_empty=2) == {"num_empty"}
    assert faults(FLAT, num_errors=1) == {"num_errors"}
