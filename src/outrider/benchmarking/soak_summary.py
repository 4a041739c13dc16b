"""What the turns of a soak say: figures, phases with their causes, faults and warnings.

Turns of one kind do the same work in every session, so a turn's speed is compared with that of its kind: what differs
between kinds (a long prompt, code that drafts well) is no phase.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider import metrics
from outrider.benchmarking.causes import cause_of
from outrider.benchmarking.phases import Phases, find_phases
from outrider.benchmarking.soak import SoakTurn
from outrider.benchmarking.steadiness import Limits, Run, judge

MAX_TTFT_RATIO = 1.5
"""Median time to first token of the last fifth over that of the first; above is a warning."""
FAST_SHARE = 0.75
"""Of a kind's speeds: the level that its turns are compared with. A server may be slow for less than the rest."""
MIN_MEMORY_SAMPLES, MIN_SPEED_SAMPLES = 10, 15  # a fifth of fewer speeds is one or two turns: noise


def summarize_soak(turns: Sequence[SoakTurn], limits: Limits | None = None) -> dict[str, Any]:
    """Figures, phases with their causes, and what of them is a fault (fails the soak) or a warning.

    The first session is warm-up for growth, retention and drift; for phases every turn counts. Phases are given in
    turns of the whole run, counted from 1; `rates` has the speed of each turn, relative to its kind's fast level.
    """
    limits = limits or Limits()
    rates = _relative(turns, [turn.tokens_per_s for turn in turns])
    found, numbers = _phases(rates)
    phases = _with_causes(found, turns, numbers)
    steady = judge(_run(turns, rates), limits)
    ttft_ratio = _median_ratio(_warm(turns, _relative(turns, [turn.ttft_s for turn in turns])))
    speeds = [turn.tokens_per_s for turn in turns if turn.tokens_per_s is not None]
    is_slow = found.is_cycle or any(phase.last > phase.first for phase in found.degraded)
    has_lost = any(turn.counter_fault for turn in turns)
    faults = [*steady.faults, *(["phases"] if is_slow else []), *(["counters"] if has_lost else [])]
    return {
        "num_turns": len(turns),
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "mean_acceptance_length": _acceptance_length(turns),
        "ttft_ratio": ttft_ratio,
        **steady.figures,
        "phases": phases,
        "period": found.period,
        "is_cycle": found.is_cycle,
        "rates": rates,
        "limits": {**asdict(limits), "max_ttft_ratio": MAX_TTFT_RATIO},
        "faults": faults,
        "warnings": [*_warnings(turns, ttft_ratio), *_single_slow_turns(found, numbers, is_slow=is_slow)],
        "verdict": "fail" if faults else "pass",
    }


def _relative(turns: Sequence[SoakTurn], values: Sequence[float | None]) -> list[float | None]:
    """Values as shares of their kind's fast level, which is the `FAST_SHARE` percentile of those above 0."""
    known = dict[str, list[float]]()
    for turn, value in zip(turns, values, strict=True):
        if value:
            known.setdefault(turn.kind, []).append(value)
    level = {kind: metrics.percentile(each, FAST_SHARE) or 1.0 for kind, each in known.items()}
    return [value / level[turn.kind] if value else None for turn, value in zip(turns, values, strict=True)]


def _phases(rates: Sequence[float | None]) -> tuple[Phases, list[int]]:
    """Phases of the turns that have a speed, and the numbers of these turns."""
    known = [(number, rate) for number, rate in enumerate(rates, start=1) if rate is not None]
    return find_phases([rate for _, rate in known]), [number for number, _ in known]


def _with_causes(found: Phases, turns: Sequence[SoakTurn], numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Phases as a record has them; `relative_speed` is 1 at a kind's fast level."""
    works = [turns[number - 1].work() for number in numbers]
    fast = [
        work
        for phase in found.phases
        if phase.name in ("fast", "recovered")
        for work in works[phase.first - 1 : phase.last]
    ]
    listed = []
    for phase in found.phases:
        slow = works[phase.first - 1 : phase.last]
        is_slow = phase.name in ("degraded", "transition")
        listed.append(
            {
                "name": phase.name,
                "first": numbers[phase.first - 1],
                "last": numbers[phase.last - 1],
                "relative_speed": phase.tokens_per_s,
                "cause": cause_of(slow, fast) if is_slow else None,
            }
        )
    return listed


def _run(turns: Sequence[SoakTurn], rates: Sequence[float | None]) -> Run:
    warm = [turn for turn in turns if turn.session > 1]
    speeds = _warm(turns, rates)
    lengths = _warm(turns, _relative(turns, [_acceptance_length([turn]) for turn in turns]))
    read = [turn for turn in warm if turn.memory_bytes]  # 0 bytes are a figure that nobody keeps
    has_memory = len(read) >= MIN_MEMORY_SAMPLES
    return Run(
        times_s=[turn.started_s for turn in read] if has_memory else (),
        memory_bytes=[turn.memory_bytes or 0.0 for turn in read] if has_memory else (),
        tokens_per_s=speeds if len(speeds) >= MIN_SPEED_SAMPLES else (),
        acceptance_lengths=lengths if len(lengths) >= MIN_SPEED_SAMPLES else (),
        num_errors=sum(turn.error is not None for turn in turns),
        num_empty=sum(turn.is_empty for turn in turns),
    )


def _warm(turns: Sequence[SoakTurn], values: Sequence[float | None]) -> list[float]:
    """The values that there are, without those of the first session."""
    return [value for turn, value in zip(turns, values, strict=True) if turn.session > 1 and value is not None]


def _median_ratio(values: Sequence[float]) -> float | None:
    """Median of the last fifth over that of the first: one slow turn is not growth."""
    if len(values) < MIN_SPEED_SAMPLES:
        return None
    fifth = len(values) // 5
    return statistics.median(values[-fifth:]) / statistics.median(values[:fifth])


def _acceptance_length(turns: Sequence[SoakTurn]) -> float | None:
    """1 + accepted ÷ drafts, pooled; None without drafts."""
    num_drafts = sum(turn.num_drafts or 0 for turn in turns)
    return 1 + sum(turn.num_accepted_tokens or 0 for turn in turns) / num_drafts if num_drafts else None


def _warnings(turns: Sequence[SoakTurn], ttft_ratio: float | None) -> list[str]:
    found = []
    if ttft_ratio is not None and ttft_ratio > MAX_TTFT_RATIO:
        found.append(f"time to first token grew by {ttft_ratio:.2f}×")
    if sum(bool(turn.memory_bytes) for turn in turns) < MIN_MEMORY_SAMPLES:
        found.append("memory was not judged: the server exports no figure; on this machine, name --server-pid")
    if all(turn.num_drafts is None for turn in turns):
        found.append("the server says nothing of its drafts, so causes of slow decoding are unknown")
    answered = [turn for turn in turns if turn.error is None]
    if (
        answered
        and not any(turn.num_draft_tokens for turn in turns)
        and any(turn.num_drafts is not None for turn in turns)
    ):
        found.append("nothing was drafted in the whole run")
    lost = [turn.counter_fault for turn in turns if turn.counter_fault]
    if lost:
        found.append(f"counters were lost in {len(lost)} of {len(turns)} turns; the first: {lost[0]}")
    shared = [turn for turn in turns if (turn.num_generation_tokens or 0) > (turn.num_output_tokens or 0) + 1]
    if shared:
        found.append(f"other requests ran during {len(shared)} of {len(turns)} turns: speeds are not this soak's alone")
    return found


def _single_slow_turns(found: Phases, numbers: Sequence[int], *, is_slow: bool) -> list[str]:
    """Slow turns that stand alone are no phase that fails a soak: any machine has one now and then."""
    if is_slow or not found.degraded:
        return []
    listed = ", ".join(str(numbers[phase.first - 1]) for phase in found.degraded)
    return [f"single turns were slow: {listed}"]
