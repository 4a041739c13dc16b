"""Every formula once: acceptance, speed, and which text repeats itself. No torch.

Acceptance is always pooled: a ratio of sums over all cycles, never a mean of per-request ratios. A figure that its
counts leave undefined (no cycle, no draft) is None, which JSON writes as null; it is never 0 or NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, sqrt

from outrider.core import AcceptanceStats

REPEAT_NGRAM = 4  # tokens; a cycle whose anchor ends a 4-gram seen before continues a repeat


def pool(stats: Iterable[AcceptanceStats]) -> AcceptanceStats:
    """Sum the counts of several requests into one new AcceptanceStats."""
    pooled = AcceptanceStats()
    for one in stats:
        pooled.num_cycles += one.num_cycles
        pooled.num_draft_tokens += one.num_draft_tokens
        pooled.num_accepted_tokens += one.num_accepted_tokens
        for num_accepted_tokens, num_cycles in one.accepted_histogram.items():
            pooled.accepted_histogram[num_accepted_tokens] = (
                pooled.accepted_histogram.get(num_accepted_tokens, 0) + num_cycles
            )
    return pooled


def mean_acceptance_length(stats: AcceptanceStats) -> float | None:
    """Tokens a cycle is worth, the target's own included: 1 + accepted draft tokens per cycle. None without a cycle."""
    if stats.num_cycles == 0:
        return None
    return 1.0 + stats.num_accepted_tokens / stats.num_cycles


def acceptance_rate(stats: AcceptanceStats) -> float | None:
    """Accepted ÷ drafted tokens, in [0, 1]; the target's own token on neither side. None where nothing was drafted."""
    if stats.num_draft_tokens == 0:
        return None
    return stats.num_accepted_tokens / stats.num_draft_tokens


def acceptance_by_position(stats: AcceptanceStats, *, num_speculative_tokens: int) -> tuple[float, ...]:
    """Share of all cycles that accepted draft token i, for i in 0 … num_speculative_tokens − 1; never rises with i.

    A cycle that drafted fewer tokens counts as one that did not accept the rest. Empty without a cycle.
    """
    if stats.num_cycles == 0:
        return ()
    reached = [0] * num_speculative_tokens
    for num_accepted_tokens, num_cycles in stats.accepted_histogram.items():
        for position in range(min(num_accepted_tokens, num_speculative_tokens)):
            reached[position] += num_cycles
    return tuple(count / stats.num_cycles for count in reached)


def num_rejected_tokens(stats: AcceptanceStats) -> int:
    """Draft tokens that were verified for nothing."""
    return stats.num_draft_tokens - stats.num_accepted_tokens


def speedup(*, baseline_s: Sequence[float], speculative_s: Sequence[float]) -> float:
    """Baseline time ÷ speculative time over the same requests in the same order, each list in seconds."""
    if len(baseline_s) != len(speculative_s) or not baseline_s:
        raise ValueError(
            f"speedup compares the same requests, but got {len(baseline_s)} baseline and "
            f"{len(speculative_s)} speculative times."
        )
    if min(baseline_s) <= 0 or min(speculative_s) <= 0:
        raise ValueError("speedup needs times above 0 s; a request that decoded nothing has none and is left out.")
    return sum(baseline_s) / sum(speculative_s)


def tokens_per_s(*, num_tokens: int, seconds: float) -> float | None:
    """Throughput; None where no time passed."""
    return num_tokens / seconds if seconds > 0 else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` (0 < share <= 1) of them do not exceed; None where there are none."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None


def ends_known_ngram(tokens: Sequence[int], n: int = REPEAT_NGRAM) -> bool:
    """True where the last n tokens already occur earlier in `tokens`; the two may overlap."""
    last = tuple(tokens[-n:])
    return len(last) == n and any(tuple(tokens[start : start + n]) == last for start in range(len(tokens) - n))


class NgramSeen:
    """`ends_known_ngram` for a text that grows token by token, in constant time a token."""

    def __init__(self, n: int = REPEAT_NGRAM) -> None:
        """Start with no text; push the prompt first, then the output."""
        if n < 1:
            raise ValueError(f"n={n}, but an n-gram has at least one token.")
        self._last: deque[int] = deque(maxlen=n)
        self._seen: set[tuple[int, ...]] = set()

    def push(self, token_id: int) -> bool:
        """Append one token; True where the n tokens it ends had occurred before."""
        self._last.append(token_id)
        if len(self._last) < (self._last.maxlen or 0):
            return False
        ngram = tuple(self._last)
        known = ngram in self._seen
        self._seen.add(ngram)
        return known


def repeated_share(units: Sequence[Hashable], n: int = REPEAT_NGRAM) -> float:
    """Share of a text's n-grams that occurred in it before: 1 − different ÷ all; 0.0 for fewer than n units."""
    ngrams = [tuple(units[start : start + n]) for start in range(len(units) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


@dataclass(frozen=True)
class Trend:
    """A straight line through a series: its slope and that slope's standard error, in values per unit of time."""

    slope: float
    standard_error: float


def fitted_trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Ordinary least squares over at least three points; the error is of independent deviations from the line.

    slope = S_tv / S_tt and error² = (S_vv − slope · S_tv) / ((n − 2) · S_tt), S being sums of products of deviations
    from the means. ValueError for fewer points or no spread in time.
    """
    if len(times) != len(values) or len(times) < 3 or min(times) == max(times):
        raise ValueError(f"a trend needs three points or more, apart in time; here are {len(times)} and {len(values)}")
    mean_time, mean_value = _mean(times), _mean(values)
    spread = sum((time - mean_time) ** 2 for time in times)
    shared = sum((time - mean_time) * (value - mean_value) for time, value in zip(times, values, strict=True))
    total = sum((value - mean_value) ** 2 for value in values)
    slope = shared / spread
    unexplained = max(0.0, total - slope * shared)
    return Trend(slope, sqrt(unexplained / ((len(times) - 2) * spread)))


def retention(values: Sequence[float]) -> float:
    """Mean of the last fifth over mean of the first; ValueError for fewer than five values."""
    if len(values) < 5:
        raise ValueError(f"retention compares fifths; here are {len(values)} values")
    fifth = len(values) // 5
    return _mean(values[-fifth:]) / _mean(values[:fifth])


def floor_rise(values: Sequence[float]) -> float:
    """How far a series rose to a level that it never left again: the most that all values from some place on lie above
    the least before it. Five values or more before, a fifth of all or more after; ValueError where there is no such
    place. A saw-tooth has none, however high its teeth, and its rise is about 0.
    """
    places = range(5, len(values) - max(5, len(values) // 5) + 1)
    if not places:
        raise ValueError(f"a floor needs ten values or more; here are {len(values)}")
    least_before, least_after = list(accumulate(values, min)), list(accumulate(reversed(values), min))[::-1]
    return max(least_after[place] - least_before[place - 1] for place in places)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
