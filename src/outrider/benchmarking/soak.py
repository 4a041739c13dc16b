"""Soak a server: agent sessions for a long time, judged by growth, retention, empty answers, phases and cycles.

Turns of one kind do the same work in every session, so a turn's speed is compared with that of its kind: what differs
between kinds (a long prompt, code that drafts well) is no phase.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider import metrics
from outrider.benchmarking.causes import Work, cause_of
from outrider.benchmarking.client import Sample, ServerClient, ServerKind
from outrider.benchmarking.counters import Counters, read_counters
from outrider.benchmarking.phases import Phases, find_phases
from outrider.benchmarking.sessions import SYSTEM, Conversation, Shape
from outrider.benchmarking.steadiness import Limits, Run, judge
from outrider.benchmarking.workloads import Workload
from outrider.errors import ConfigError, EngineFault

__all__ = [
    "SoakTurn",
    "find_phases",
    "process_memory",
    "run_soak",
    "settled_metrics",
    "soak_workload",
    "summarize_soak",
]

MAX_TTFT_RATIO = 1.5
"""Median time to first token of the last fifth over that of the first; above is a warning."""
FAST_SHARE = 0.75
"""Of a kind's speeds: the level that its turns are compared with. A server may be slow for less than the rest."""
SETTLE_S = 1.0
MIN_MEMORY_SAMPLES, MIN_SPEED_SAMPLES = 10, 15  # a fifth of fewer speeds is one or two turns: noise
_SERVER_LATENCY = re.compile(r"^\w+:e2e_request_latency_seconds_sum(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_RESIDENT = re.compile(r"^process_resident_memory_bytes(?:\{[^}]*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class SoakTurn:
    """One turn: a row of the record. Sessions and turns count from 1; times in seconds."""

    session: int
    turn: int
    kind: str
    started_s: float
    ttft_s: float | None
    e2e_s: float
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    num_chunks: int
    finish_reason: str | None
    error: str | None
    is_empty: bool
    """It ended well, and there is no text, no thought and no call in it."""
    num_drafts: int | None
    num_draft_tokens: int | None
    num_accepted_tokens: int | None
    num_generation_tokens: int | None
    """By the server's counter; more than the answer has is another client's work."""
    server_s: float | None
    memory_bytes: float | None
    counter_fault: str | None = None
    """Why nothing was counted: the server is gone, or was started anew."""
    tokens_per_s: float | None = None
    """End to end, at its kind's median length: N ÷ (TTFT + (N − 1) · TPOT), so that a short answer is no slow one."""

    def work(self) -> Work:
        """What `cause_of` compares; only for turns that have a speed."""
        return Work(
            kind=self.kind,
            num_tokens=self.num_output_tokens or 0,
            ttft_s=self.ttft_s or 0.0,
            e2e_s=self.e2e_s,
            server_s=self.server_s,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


def soak_workload(shape: Shape) -> Workload:
    """What a record says of the sessions: their texts and sizes, without salt."""
    turns = (f"{turn.kind}|{turn.text}|{turn.max_tokens}|{turn.num_result_characters}" for turn in shape.turns)
    return Workload(f"soak-{shape.name}", (SYSTEM, *turns))


def run_soak(
    client: ServerClient,
    shape: Shape,
    *,
    salt: str,
    has_tools: bool = True,
    memory: Callable[[], float | None] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[SoakTurn]:
    """Run all sessions one after another, a turn at a time, and read the counters around each turn.

    `memory` reads the server's memory in bytes; without it the server's own figure is taken where it exports one.
    A server that is gone or was started anew spoils the counters of that turn and is its `counter_fault`: what was seen
    until then, perhaps in hours, is kept.
    """
    kind = client.server_kind()
    text, counters = settled_metrics(client, kind)
    turns = list[SoakTurn]()
    for session in range(1, shape.num_sessions + 1):
        conversation = Conversation(shape.turns, f"{salt}-{session}", has_tools=has_tools)
        for number, (turn, request) in enumerate(conversation.requests(), start=1):
            progress(f"session {session}, {turn.kind}")
            sample = client.complete(request)
            conversation.answered(sample)
            before, counted_before = text, counters
            grown, server_s, fault = Counters(), None, None
            try:
                text, counters = settled_metrics(client, kind)
                grown, server_s = counters - counted_before, _difference(_SERVER_LATENCY, before, text)
            except EngineFault as error:
                fault = str(error)
            resident = memory() if memory is not None else _reading(_RESIDENT, text)
            row = _row(sample, grown, server_s=server_s, memory_bytes=resident)
            turns.append(SoakTurn(session=session, turn=number, kind=turn.kind, counter_fault=fault, **row))
    return _with_speeds(turns)


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


def process_memory(pid: int) -> Callable[[], float | None]:
    """Reads the resident bytes of a process of this machine and all its children, None once it is gone.

    ConfigError where there is none to begin with.
    """
    try:
        import psutil
    except ImportError:
        raise ConfigError("--server-pid needs psutil. Install it, or leave the option out.") from None
    try:
        process = psutil.Process(pid)
        process.memory_info()
    except (psutil.Error, ValueError):
        raise ConfigError(
            f"--server-pid {pid}: there is no such process that can be read. Give the server's own."
        ) from None

    def read() -> float | None:
        try:
            total, children = float(process.memory_info().rss), process.children(recursive=True)
        except psutil.Error:
            return None  # a server that is gone has no memory, which is not 0 bytes
        for each in children:
            with suppress(psutil.Error):  # it ended while we looked
                total += each.memory_info().rss
        return total

    return read


def settled_metrics(client: ServerClient, kind: ServerKind) -> tuple[str, Counters]:
    """/metrics once nothing runs, for a server may count an answer after its last event; other clients get a second."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        text = client.metrics_text()
        counters = read_counters(text, kind)
        if not counters.num_requests_running or time.monotonic() > end_s:
            return text, counters
        time.sleep(SETTLE_S / 50)


def _row(sample: Sample, grown: Counters, *, server_s: float | None, memory_bytes: float | None) -> dict[str, Any]:
    """Fields of a turn; drafts are the answer's own where it has them, for counters may have other clients' work."""
    own = sample.acceptance or {}
    return {
        "started_s": sample.started_s,
        "ttft_s": sample.ttft_s,
        "e2e_s": sample.e2e_s,
        "num_prompt_tokens": sample.num_prompt_tokens,
        "num_output_tokens": sample.num_output_tokens,
        "num_chunks": sample.num_chunks,
        "finish_reason": sample.finish_reason,
        "error": sample.error,
        "is_empty": sample.error is None and not (sample.text or sample.reasoning or sample.tool_calls),
        "num_drafts": own.get("num_spec_steps", grown.num_drafts),
        "num_draft_tokens": own.get("num_draft_tokens", grown.num_draft_tokens),
        "num_accepted_tokens": own.get("num_accepted_draft_tokens", grown.num_accepted_tokens),
        "num_generation_tokens": grown.num_generation_tokens,
        "server_s": server_s,
        "memory_bytes": memory_bytes,
    }


def _with_speeds(turns: Sequence[SoakTurn]) -> list[SoakTurn]:
    lengths = dict[str, list[int]]()
    for turn in turns:
        if turn.error is None and turn.num_output_tokens:
            lengths.setdefault(turn.kind, []).append(turn.num_output_tokens)
    usual = {kind: statistics.median(counts) for kind, counts in lengths.items()}
    return [replace(turn, tokens_per_s=_speed(turn, usual.get(turn.kind, 0.0))) for turn in turns]


def _speed(turn: SoakTurn, num_tokens: float) -> float | None:
    if turn.error is not None or not turn.num_output_tokens or turn.ttft_s is None or turn.e2e_s <= 0:
        return None
    return num_tokens / (turn.ttft_s + (num_tokens - 1) * turn.work().tpot_s)


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
    read = [turn for turn in warm if turn.memory_bytes is not None]
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
    if sum(turn.memory_bytes is not None for turn in turns) < MIN_MEMORY_SAMPLES:
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


def _difference(pattern: re.Pattern[str], before: str, after: str) -> float | None:
    early, late = _reading(pattern, before), _reading(pattern, after)
    return None if early is None or late is None else late - early


def _reading(pattern: re.Pattern[str], text: str) -> float | None:
    """The sum of all series of a name; None where there is none."""
    values = [float(value) for value in pattern.findall(text)]
    return sum(values) if values else None
