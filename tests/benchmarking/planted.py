"""Runs of a comparison as a machine with noise, drift and hard prompts would give them, many at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.benchmarking.compare import plan_turns

Floats = NDArray[np.float64]


def places(*, num_prompts: int, num_rounds: int) -> NDArray[np.int64]:
    """When each request of two arms comes, [arms, prompts, rounds], in the order of `bench compare`."""
    found = np.zeros((2, num_prompts, num_rounds), dtype=np.int64)
    for place, turn in enumerate(plan_turns(num_arms=2, num_prompts=num_prompts, num_rounds=num_rounds)):
        found[turn.arm_index, turn.prompt_index, turn.round_index] = place
    return found


def blocks(*, num_prompts: int, num_rounds: int) -> NDArray[np.int64]:
    """The same for the order that many use: all of one arm, then all of the other."""
    return np.arange(2 * num_prompts * num_rounds).reshape(2, num_rounds, num_prompts).transpose(0, 2, 1)


def seconds(
    random: np.random.Generator, order: NDArray[np.int64], *, num_runs: int, speedup: float = 1.0
) -> tuple[Floats, Floats]:
    """Seconds a token [runs, prompts, rounds] of a baseline and of an arm `speedup` times as fast.

    Prompts differ by 30 % and in what the arm makes of them by 3 %. Noise only slows, and its tail is long (gamma,
    skewness 1.6). The machine gets up to 30 % slower from first to last, wanders, and starts cold.
    """
    _, num_prompts, _ = order.shape
    progress = np.arange(order.size) / order.size
    drift = random.uniform(0.0, 0.3, (num_runs, 1)) * progress + 0.1 * np.exp(-20 * progress)
    drift = drift + np.cumsum(random.normal(0, 0.002, (num_runs, order.size)), axis=1)
    hardness = random.normal(0, 0.3, (num_runs, num_prompts, 1))
    own = random.normal(0, 0.03, (num_runs, num_prompts, 1)) - np.log(speedup)
    baseline, other = (drift[:, order[arm]] + random.gamma(1.5, 0.03, (num_runs, *order[arm].shape)) for arm in (0, 1))
    return np.exp(hardness + baseline), np.exp(hardness + own + other)
