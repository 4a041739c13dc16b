"""Are these counts draws from that distribution? Seeds are fixed, so that a pass stays a pass (case F8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from itertools import product

import torch
from scipy import stats
from torch import Tensor

MAX_DEVIATIONS = 4.5
MIN_P_VALUE = 1e-4


def assert_frequencies(drawn: Iterable[int], probs: Iterable[float]) -> None:
    """F8: no category is more than 4.5 standard deviations from its expected count."""
    counts = Counter(drawn)
    total = sum(counts.values())
    for category, prob in enumerate(probs):
        spread = (total * prob * (1 - prob)) ** 0.5
        assert abs(counts[category] - total * prob) <= MAX_DEVIATIONS * spread, (category, counts, total * prob)


def assert_chi_square(drawn: Iterable[Hashable], probs: Mapping[Hashable, float]) -> None:
    """Pearson's test of all outcomes together; an impossible one must not occur."""
    counts = Counter(drawn)
    assert not {outcome for outcome in counts if probs.get(outcome, 0.0) <= 0.0}
    total, possible = sum(counts.values()), [outcome for outcome, prob in probs.items() if prob > 0]
    expected = [total * probs[outcome] for outcome in possible]
    assert min(expected) >= 5, "more draws are needed"
    assert stats.chisquare([counts[outcome] for outcome in possible], expected).pvalue > MIN_P_VALUE, counts


def sequence_probs(table: Tensor, last: int, length: int) -> dict[Hashable, float]:
    """Chance of every sequence of `length` tokens after `last`, under logits [V, V] by last token."""
    step = table.softmax(dim=-1)
    chances: dict[Hashable, float] = {}
    for sequence in product(range(len(table)), repeat=length):
        pairs = zip((last, *sequence), sequence, strict=False)
        chances[sequence] = float(torch.stack([step[before, after] for before, after in pairs]).prod())
    return chances
