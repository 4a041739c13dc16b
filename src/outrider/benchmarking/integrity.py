"""Whether the figures of a run may be believed: what spoils them, each by name with what was seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.answer_quality import quality_flag
from outrider.benchmarking.runner import Run

MAX_TOLD_RATIO = 2
"""Tokens of answers by usage over those that the server counted: beyond, neither is believed."""
MAX_LOOPING_SHARE = 0.5
"""Of the answers: beyond, a run's speed is that of loops."""
_NORMAL_DEVIATIONS_PER_MAD = 1.4826  # the median absolute deviation of a normal distribution is σ ÷ 1.4826


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run may show and still be believed."""

    max_cached_excess: float = 0.05
    """Share of prompt tokens cached beyond the share that was meant to be: a chat template's beginning is always."""
    max_client_lag_s: float = 0.02
    max_arrival_lag_s: float = 0.1
    num_robust_deviations: float = 3.0
    """How far the first tenth's median may be above the others' before the warm-up is thought too short (T-064)."""
    least_deviation: float = 0.05
    """Of the median: requests whose times hardly differ are no reason for a warning."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    name: str
    is_fatal: bool
    """Whether the run's figures must not be used; otherwise it is a warning."""
    detail: str


def examine(run: Run, limits: Limits | None = None) -> tuple[Finding, ...]:
    """All findings of a run, none for a sound one.

    Fatal: stopped, no_tokens, no_usage, request_errors, empty_answers, other_tenant, counter_reset, cache_hits,
    cache_bypass, client_bound, buffered, fewer_counted beyond `MAX_TOLD_RATIO`. Warnings: warm_up, no_counters,
    not_drafted, fewer_counted, looping_answers.
    """
    limits = limits or Limits()
    return (
        *_answers(run.samples),
        *_counters(run),
        *_cache(run, limits),
        *_client(run, limits),
        *_warm_up(run.samples, limits),
    )


def cached_share(run: Run) -> float | None:
    """Prompt tokens found in a prefix cache ÷ all; by usage, else by the counters, None where neither tells."""
    told = [each for each in run.samples if each.num_cached_tokens is not None and each.num_prompt_tokens]
    if told:
        return sum(each.num_cached_tokens or 0 for each in told) / sum(each.num_prompt_tokens or 0 for each in told)
    counted = run.counted
    if counted is None or counted.num_cached_prompt_tokens is None or not counted.num_prompt_tokens:
        return None
    return counted.num_cached_prompt_tokens / counted.num_prompt_tokens


def _answers(samples: Sequence[Sample]) -> Iterator[Finding]:
    failed = [each for each in samples if each.error is not None]
    sound = [each for each in samples if each.error is None]
    if failed:
        yield Finding("request_errors", True, f"{len(failed)} of {len(samples)} failed; the first: {failed[0].error}")
    without = [each for each in sound if each.num_output_tokens is None]
    if without:
        yield Finding("no_usage", True, f"{len(without)} answers came without usage, so their tokens are unknown")
    empty = [each for each in sound if each.num_output_tokens == 0]
    if empty and len(empty) < len(sound):
        yield Finding("empty_answers", True, f"{len(empty)} of {len(sound)} answers have no token")
    looping = [each for each in sound if quality_flag(each.text + each.reasoning, each.tool_calls) == "loop"]
    if len(looping) > MAX_LOOPING_SHARE * len(sound):
        detail = f"{len(looping)} of {len(sound)} answers mostly repeat themselves, which drafts easily: mind the speed"
        yield Finding("looping_answers", False, detail)
    buffered = [each for each in sound if each.is_buffered]
    if buffered:
        detail = f"{len(buffered)} of {len(sound)} answers came all at once at their end: something holds chunks back"
        yield Finding("buffered", True, detail)
    if not any(each.num_output_tokens for each in samples) and not without:
        yield Finding("no_tokens", True, "no answer has a token")


def _counters(run: Run) -> Iterator[Finding]:
    if run.was_stopped:
        detail = f"the run ended after {len(run.samples)} of {run.load.num_requests} answers"
        yield Finding("stopped", True, detail)
        return
    if run.counter_fault is not None:
        yield Finding("counter_reset", True, run.counter_fault)
        return
    if run.was_busy:
        yield Finding("other_tenant", True, "requests that are not ours were running before or after the run")
    counted = run.counted
    if counted is None or counted.num_generation_tokens is None:
        yield Finding("no_counters", False, "the server exports no counters we know: nothing checks the client's")
        return
    num_asked, num_failed = len(run.samples), sum(each.error is not None for each in run.samples)
    told = sum(each.num_output_tokens or 0 for each in run.samples)
    finished = counted.num_requests_finished
    is_told = all(each.num_output_tokens is not None for each in run.samples if each.error is None)
    num_more = counted.num_generation_tokens - told
    if finished is not None and finished > num_asked:
        yield Finding("other_tenant", True, f"the server finished {finished} requests; {num_asked} were ours")
    elif is_told and num_more > num_asked + num_failed * run.load.max_tokens:  # a stop token may count on one side only
        yield Finding("other_tenant", True, f"the server wrote {num_more} tokens more than our answers have")
    elif num_more < -num_asked:
        detail = f"answers have {-num_more} tokens more than the server counted: usage is wrong, or counters another's"
        yield Finding("fewer_counted", told > MAX_TOLD_RATIO * counted.num_generation_tokens, detail)
    if counted.num_drafts == 0 and told:
        yield Finding("not_drafted", False, "tokens were written and nothing was drafted: speculation was off")


def _cache(run: Run, limits: Limits) -> Iterator[Finding]:
    share, expected = cached_share(run), run.load.expected_cached_share
    if share is None:
        return
    if share > expected + limits.max_cached_excess:
        detail = (
            f"{share:.0%} of prompt tokens came from a cache, {expected:.0%} were meant to: prompts were seen before"
        )
        yield Finding("cache_hits", True, detail)
    elif expected > 0 and share < expected - limits.max_cached_excess:
        detail = f"{share:.0%} of prompt tokens came from a cache where {expected:.0%} should: it is off or bypassed"
        yield Finding("cache_bypass", True, detail)


def _client(run: Run, limits: Limits) -> Iterator[Finding]:
    if run.client_lag_s > limits.max_client_lag_s:
        detail = f"this process woke up to {1e3 * run.client_lag_s:.0f} ms late: it was measured, not the server"
        yield Finding("client_bound", True, detail)
    elif run.arrival_lag_s is not None and run.arrival_lag_s > limits.max_arrival_lag_s:
        detail = f"requests were sent up to {1e3 * run.arrival_lag_s:.0f} ms late: the rate was not what was asked"
        yield Finding("client_bound", True, detail)


def _warm_up(samples: Sequence[Sample], limits: Limits) -> Iterator[Finding]:
    times_s = [each.e2e_s / max(1, each.num_output_tokens or 0) for each in samples if each.error is None]
    num_first = len(times_s) // 10
    if num_first < 1:
        return
    first, others = times_s[:num_first], times_s[num_first:]
    usual = median(others)
    deviation = _NORMAL_DEVIATIONS_PER_MAD * median(abs(each - usual) for each in others)
    allowed = limits.num_robust_deviations * max(deviation, limits.least_deviation * usual)
    if median(first) - usual > allowed:
        ratio = median(first) / usual
        yield Finding("warm_up", False, f"the first tenth took {ratio:.1f} times as long: give more warm-up requests")
