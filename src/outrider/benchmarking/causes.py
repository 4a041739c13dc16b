"""Why a phase is slow: what of its extra time the client, the prefill, the drafts and the steps account for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

DRAFTING_OFF = "drafting off"
ACCEPTANCE_COLLAPSED = "acceptance collapsed"
STEPS_SLOW = "steps slow"
PREFILL = "prefill"
CLIENT = "client"
UNKNOWN = "unknown"
"""It is decoding that is slow, and the server has no counters that would say why."""
MIN_SHARE = 0.5
"""A cause accounts for at least so much of the extra time."""
OFF_SHARE = 0.1
"""Drafting is off where an answer's tokens are drafted less than so often as they are in fast phases."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one request took, and what the server counted meanwhile; None where it does not say."""

    kind: str
    """Requests of one kind are compared with each other: a long prompt has its own prefill."""
    num_tokens: int
    ttft_s: float
    e2e_s: float
    server_s: float | None = None
    """By the server's own clock, receipt to last token."""
    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None

    @property
    def tpot_s(self) -> float:
        """(e2e − TTFT) ÷ (tokens − 1); 0 for one token."""
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


def cause_of(slow: Sequence[Work], fast: Sequence[Work]) -> str:
    """What made requests slow, in comparison with those of fast phases.

    Extra seconds are those over the median of fast requests of the same kind, with the tokens this request had. Where
    neither client nor prefill account for half of them it is decoding; its time a token is time a cycle ÷ tokens a
    cycle, so the logarithm of its growth is the sum of theirs, and the larger part is the cause.
    """
    extra_s, prefill_s, client_s = 0.0, 0.0, 0.0
    for work in slow:
        ttft_s, tpot_s = (_usual(fast, work.kind, of) for of in (_ttft, _tpot))
        extra_s += work.e2e_s - ttft_s - tpot_s * (work.num_tokens - 1)
        prefill_s += work.ttft_s - ttft_s
        if work.server_s is not None:
            client_s += work.e2e_s - work.server_s - _usual(fast, work.kind, _outside)
    if client_s > 0 and client_s >= MIN_SHARE * extra_s:
        return CLIENT
    if prefill_s > 0 and prefill_s >= MIN_SHARE * extra_s:
        return PREFILL
    return _cause_of_decoding(slow, fast)


def _cause_of_decoding(slow: Sequence[Work], fast: Sequence[Work]) -> str:
    now, before = _drafts_per_token(slow), _drafts_per_token(fast)
    if now is None or before is None:
        return UNKNOWN
    if before > 0 and now < OFF_SHARE * before:
        return DRAFTING_OFF
    now_length, before_length = _acceptance_length(slow), _acceptance_length(fast)
    if now_length is None or before_length is None:
        return STEPS_SLOW
    growth = log(max(1e-9, _mean(slow, _tpot))) - log(max(1e-9, _mean(fast, _tpot)))
    return ACCEPTANCE_COLLAPSED if log(before_length / now_length) >= MIN_SHARE * growth else STEPS_SLOW


def _usual(fast: Sequence[Work], kind: str, of: Callable[[Work], float]) -> float:
    alike = [of(work) for work in fast if work.kind == kind] or [of(work) for work in fast]
    return statistics.median(alike) if alike else 0.0


def _ttft(work: Work) -> float:
    return work.ttft_s


def _tpot(work: Work) -> float:
    return work.tpot_s


def _outside(work: Work) -> float:
    return 0.0 if work.server_s is None else work.e2e_s - work.server_s


def _mean(works: Sequence[Work], of: Callable[[Work], float]) -> float:
    return statistics.fmean(of(work) for work in works)


def _drafts_per_token(works: Sequence[Work]) -> float | None:
    counts = [(work.num_draft_tokens, work.num_tokens) for work in works if work.num_draft_tokens is not None]
    num_tokens = sum(tokens for _, tokens in counts)
    return sum(drafted for drafted, _ in counts) / num_tokens if num_tokens else None


def _acceptance_length(works: Sequence[Work]) -> float | None:
    """1 + accepted ÷ drafts, pooled; None without drafts."""
    counts = [(work.num_drafts, work.num_accepted_tokens) for work in works if work.num_drafts]
    num_drafts = sum(drafts or 0 for drafts, _ in counts)
    return 1 + sum(accepted or 0 for _, accepted in counts) / num_drafts if num_drafts else None
