"""A server's own counters, read from /metrics: what happened in a run is the difference of two readings.

Names: vLLM's, which Outrider and (for speculation) llama.cpp export under prefixes of their own, and SGLang's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families

from outrider.benchmarking.client import ServerClient, ServerKind
from outrider.errors import EngineFault

_VLLM = {
    "num_drafts": ("spec_decode_num_drafts_total",),
    "num_draft_tokens": ("spec_decode_num_draft_tokens_total",),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens_total",),
    "num_prompt_tokens": ("prompt_tokens_total",),
    "num_generation_tokens": ("generation_tokens_total",),
    "num_cached_prompt_tokens": ("prefix_cache_hits_total",),
    "num_requests_running": ("num_requests_running", "num_requests_waiting"),
    "num_requests_finished": ("request_success_total",),
}
_SGLANG = {
    "num_drafts": ("spec_verify_calls_total",),
    "num_prompt_tokens": ("prompt_tokens_total",),
    "num_generation_tokens": ("generation_tokens_total",),
    "num_cached_prompt_tokens": ("cached_tokens_total",),
    "num_requests_running": ("num_running_reqs", "num_queue_reqs"),
    "num_requests_finished": ("num_requests_total",),
}
_LLAMA = {
    "num_drafts": ("spec_decode_num_drafts_total",),
    "num_draft_tokens": ("spec_decode_num_draft_tokens_total",),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens_total",),
    "num_prompt_tokens": ("prompt_tokens_total",),
    "num_generation_tokens": ("tokens_predicted_total",),
    "num_requests_running": ("requests_processing", "requests_deferred"),
}
_STARTED = "process_start_time_seconds"
SETTLE_S = 1.0
_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_NAMES: dict[ServerKind, tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]]] = {
    "outrider": (("outrider:", "vllm:"), _VLLM),  # `outrider serve --metrics-prefix vllm`
    "vllm": (("vllm:",), _VLLM),
    "sglang": (("sglang:",), _SGLANG),
    "llama.cpp": (("llamacpp:",), _LLAMA),
}


class CounterReset(EngineFault):
    """A counter fell between two readings: the server was started anew, and the run is worth nothing."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Counts since the server's start, summed over engines and models; None where the server has none."""

    num_drafts: int | None = None
    """Cycles that drafted."""
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    accepted_per_position: tuple[int, ...] | None = None
    """Cycles that accepted the draft token at each position."""
    num_prompt_tokens: int | None = None
    num_generation_tokens: int | None = None
    num_cached_prompt_tokens: int | None = None
    num_requests_running: int | None = None
    """Now, those that wait included; in a difference, the later reading's."""
    num_requests_finished: int | None = None
    started_s: float | None = None
    """When the server's process was started, Unix time; in a difference, the later reading's."""

    def __sub__(self, before: Counters) -> Counters:
        """What was counted since `before`; CounterReset where a counter fell or another process counts."""
        if None not in (self.started_s, before.started_s) and self.started_s != before.started_s:
            raise CounterReset(
                "the server was started anew between two readings, or two servers answer by turns. Repeat the run, and "
                "ask one server."
            )
        grown = {
            each.name: _difference(each.name, getattr(self, each.name), getattr(before, each.name))
            for each in fields(self)
            if each.name not in ("accepted_per_position", "num_requests_running", "started_s")
        }
        positions = _position_difference(self.accepted_per_position, before.accepted_per_position)
        return Counters(
            **grown,
            accepted_per_position=positions,
            num_requests_running=self.num_requests_running,
            started_s=self.started_s,
        )

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted ÷ drafts, as vLLM defines it; None without a draft or without the counters.

        SGLang counts no accepted tokens, but all its steps: tokens ÷ steps, the first token of each answer left out.
        """
        if not self.num_drafts:
            return None
        if self.num_accepted_tokens is not None:
            return 1 + self.num_accepted_tokens / self.num_drafts
        decoded = self._num_decoded_tokens
        return None if decoded is None else decoded / self.num_drafts

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ drafted tokens, in [0, 1]."""
        if not self.num_draft_tokens or self.num_accepted_tokens is None:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def acceptance_by_position(self) -> tuple[float, ...] | None:
        """Share of the drafts that accepted each position; 1 + their sum is the acceptance length."""
        if not self.num_drafts or self.accepted_per_position is None:
            return None
        return tuple(count / self.num_drafts for count in self.accepted_per_position)

    @property
    def fire_rate(self) -> float | None:
        """Share of decode steps that drafted, in [0, 1]: drafts ÷ (tokens − accepted), first tokens left out.

        A step emits its accepted drafts and one token more. Answers cut inside a block make it slightly too high.
        """
        decoded = self._num_decoded_tokens
        if self.num_drafts is None or self.num_accepted_tokens is None or decoded is None:
            return None
        num_steps = decoded - self.num_accepted_tokens
        return min(1.0, self.num_drafts / num_steps) if num_steps > 0 else None

    @property
    def _num_decoded_tokens(self) -> int | None:
        """Tokens but for the first of each answer, which prefill gives."""
        if self.num_generation_tokens is None or self.num_requests_finished is None:
            return None
        return self.num_generation_tokens - self.num_requests_finished


def read_counters(text: str, kind: ServerKind) -> Counters:
    """Counters of a scrape; None for those that are not exported. EngineFault for a text that is no scrape."""
    if kind not in _NAMES:
        return Counters()
    prefixes, names = _NAMES[kind]
    samples = _samples(text, prefixes)
    found = {name: _total(samples, exported) for name, exported in names.items()}
    starts = [value for name, _, value in samples if name == _STARTED]
    return Counters(**found, accepted_per_position=_by_position(samples), started_s=max(starts, default=None))


def settled_metrics(client: ServerClient, kind: ServerKind) -> tuple[str, Counters]:
    """/metrics once nothing runs, for a server may count an answer after its last event; other clients get a second."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        text = client.metrics_text()
        counters = read_counters(text, kind)
        if not counters.num_requests_running or time.monotonic() > end_s:
            return text, counters
        time.sleep(SETTLE_S / 50)


def _samples(text: str, prefixes: Sequence[str]) -> list[tuple[str, Mapping[str, str], float]]:
    """Name without its prefix, labels and value of each series."""
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # what its parser makes of other texts
        raise EngineFault(
            f"/metrics is not in Prometheus' text format ({error}). Is this the server's address?"
        ) from None
    return [
        (sample.name if prefix == _STARTED else sample.name.removeprefix(prefix), sample.labels, sample.value)
        for family in families
        for sample in family.samples
        for prefix in (*prefixes, _STARTED)
        if sample.name.startswith(prefix) and isfinite(sample.value)
    ]


def _total(samples: Iterable[tuple[str, Mapping[str, str], float]], names: Sequence[str]) -> int | None:
    values = [value for name, _, value in samples if name in names]
    return round(sum(values)) if values else None


def _by_position(samples: Iterable[tuple[str, Mapping[str, str], float]]) -> tuple[int, ...] | None:
    counts: dict[int, float] = {}
    has_drafts = False
    for name, labels, value in samples:
        has_drafts = has_drafts or name == "spec_decode_num_drafts_total"
        if name == _BY_POSITION and labels.get("position", "").isdigit():
            position = int(labels["position"])
            counts[position] = counts.get(position, 0) + value
    if not counts:
        return () if has_drafts else None
    return tuple(round(counts.get(position, 0)) for position in range(max(counts) + 1))


def _difference(name: str, after: int | None, before: int | None) -> int | None:
    if after is None and before is None:
        return None
    grown = (after or 0) - (before or 0)  # a series may appear with its first event, and is gone after a restart
    if grown < 0:
        raise CounterReset(f"{name} fell from {before} to {after}: the server started anew. Repeat the run.")
    return grown


def _position_difference(after: Sequence[int] | None, before: Sequence[int] | None) -> tuple[int, ...] | None:
    if after is None:
        return None
    pairs = zip_longest(after, before or (), fillvalue=0)
    return tuple(_difference("accepted_per_position", *pair) or 0 for pair in pairs)
