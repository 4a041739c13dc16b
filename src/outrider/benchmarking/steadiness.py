"""Whether a long run stayed what it was: judged by every sample after its warm-up, never by the first and the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from outrider import metrics
from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a steady run may do; they belong into every report of a verdict."""

    max_memory_growth: float = 0.01
    """Of the mean, over the run, by a fitted line; or of the least, in a step that is never undone."""
    num_standard_errors: float = 3.0
    """A slope below so many of its own errors is taken for noise. A saw-tooth passes once it has a few teeth."""
    min_speed_retention: float = 0.97
    """Mean speed of the last fifth over that of the first."""
    max_acceptance_drift: float = 0.03
    """How far the same ratio of acceptance lengths may be from 1."""

    def __post_init__(self) -> None:
        """ConfigError for a limit that nothing could break."""
        for option, limit in (("--max-growth", self.max_memory_growth), ("--min-retention", self.min_speed_retention)):
            if not 0 <= limit < inf:
                raise ConfigError(f"{option} {limit} is no limit. Give a share from 0 up.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Samples of a run, in order and after its warm-up, and what its answers were. An empty series is not judged."""

    times_s: Sequence[float]
    memory_bytes: Sequence[float]
    tokens_per_s: Sequence[float] = ()
    acceptance_lengths: Sequence[float] = ()
    num_errors: int = 0
    num_empty: int = 0
    """Answers without a token, whatever their status was."""


@dataclass(frozen=True)
class Verdict:
    """Figures of a run, and the names of those that broke a limit."""

    figures: dict[str, float]
    faults: tuple[str, ...]


def judge(run: Run, limits: Limits | None = None) -> Verdict:
    """Compare a run with its limits; ValueError for one to nine samples of memory, or one to four of speed."""
    limits = limits or Limits()
    figures, broken = _judge_memory(run, limits) if run.memory_bytes else ({}, {})
    broken |= {"num_errors": run.num_errors > 0, "num_empty": run.num_empty > 0}
    if run.tokens_per_s:
        figures["speed_retention"] = metrics.retention(run.tokens_per_s)
        broken["speed_retention"] = figures["speed_retention"] < limits.min_speed_retention
    if run.acceptance_lengths:
        figures["acceptance_drift"] = abs(metrics.retention(run.acceptance_lengths) - 1)
        broken["acceptance_drift"] = figures["acceptance_drift"] > limits.max_acceptance_drift
    figures |= {"num_errors": run.num_errors, "num_empty": run.num_empty}
    return Verdict(figures, tuple(name for name, is_broken in broken.items() if is_broken))


def _judge_memory(run: Run, limits: Limits) -> tuple[dict[str, float], dict[str, bool]]:
    trend = metrics.fitted_trend(run.times_s, run.memory_bytes)
    per_run = (run.times_s[-1] - run.times_s[0]) / (sum(run.memory_bytes) / len(run.memory_bytes))
    growth, error = trend.slope * per_run, trend.standard_error * per_run
    step = metrics.floor_rise(run.memory_bytes) / min(run.memory_bytes)
    figures = {"memory_growth": growth, "memory_growth_error": error, "memory_step": step}
    broken = {
        "memory_growth": growth >= limits.max_memory_growth and growth > limits.num_standard_errors * error,
        "memory_step": step >= limits.max_memory_growth,
    }
    return figures, broken
