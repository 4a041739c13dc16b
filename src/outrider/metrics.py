"""Every formula once: acceptance, speed, and which text repeats itself. No torch.

Acceptance is always pooled: a ratio of sums over all cycles, never a mean of per-request ratios. A figure that its
counts leave undefined (no cycle, no draft) is None, which JSON writes as null; it is never 0 or NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

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
