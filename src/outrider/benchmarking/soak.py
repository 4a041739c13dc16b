"""Soak a server: agent sessions for a long time, each turn timed, with what the server counted around it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.causes import Work
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.counters import Counters, settled_metrics
from outrider.benchmarking.phases import find_phases
from outrider.benchmarking.sessions import SYSTEM, Conversation, Shape
from outrider.benchmarking.workloads import Workload
from outrider.errors import ConfigError, EngineFault

__all__ = ["SoakTurn", "find_phases", "process_memory", "run_soak", "soak_workload", "with_speeds"]

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
    keep: Callable[[SoakTurn], object] = lambda _: None,
) -> list[SoakTurn]:
    """Run all sessions one after another, a turn at a time, and read the counters around each turn.

    `keep` gets each turn at once, its speed left open, for a run that may be stopped. `memory` reads the server's
    memory in bytes; without it the server's own figure is taken where it exports one. A server that is gone or was
    started anew spoils the counters of that turn and is its `counter_fault`: what was seen until then, perhaps in
    hours, is kept.
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
            keep(turns[-1])
    return with_speeds(turns)


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


def _difference(pattern: re.Pattern[str], before: str, after: str) -> float | None:
    early, late = _reading(pattern, before), _reading(pattern, after)
    return None if early is None or late is None else late - early


def _reading(pattern: re.Pattern[str], text: str) -> float | None:
    """The sum of all series of a name; None where there is none."""
    values = [float(value) for value in pattern.findall(text)]
    return sum(values) if values else None


def with_speeds(turns: Sequence[SoakTurn]) -> list[SoakTurn]:
    """The same turns with their speed at the median length of their kind, which all turns together give."""
    lengths = dict[str, list[int]]()
    for turn in turns:
        if turn.error is None and turn.num_output_tokens:
            lengths.setdefault(turn.kind, []).append(turn.num_output_tokens)
    usual = {kind: statistics.median(counts) for kind, counts in lengths.items()}
    return [replace(turn, tokens_per_s=_speed(turn, usual.get(turn.kind, 0.0))) for turn in turns]


def _speed(turn: SoakTurn, num_tokens: float) -> float | None:
    if turn.error is not None or not turn.num_output_tokens or turn.ttft_s is None or turn.e2e_s <= 0:
        return None
    usual_s = turn.ttft_s + (num_tokens - 1) * turn.work().tpot_s
    return num_tokens / usual_s if usual_s > 0 else None
