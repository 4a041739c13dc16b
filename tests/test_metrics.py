"""The formulas, on counts small enough to check by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from outrider import metrics
from outrider.core import AcceptanceStats


def make_stats(*cycles: tuple[int, int]) -> AcceptanceStats:
    """Stats of cycles given as (draft length, accepted tokens)."""
    stats = AcceptanceStats()
    for draft_length, num_accepted_tokens in cycles:
        stats.record_cycle(draft_length=draft_length, num_accepted_tokens=num_accepted_tokens)
    return stats


def test_mean_acceptance_length_counts_the_targets_token() -> None:
    assert metrics.mean_acceptance_length(make_stats((3, 3), (3, 0), (3, 2), (3, 1))) == 1 + 6 / 4


def test_acceptance_rate_leaves_the_targets_token_out() -> None:
    assert metrics.acceptance_rate(make_stats((3, 3), (1, 0))) == 3 / 4


def test_a_cycle_without_a_draft_is_worth_one_token() -> None:
    plain = make_stats((0, 0), (0, 0))
    assert metrics.mean_acceptance_length(plain) == 1.0
    assert metrics.acceptance_rate(plain) is None


def test_figures_without_a_cycle_are_undefined_not_zero() -> None:
    empty = AcceptanceStats()
    assert metrics.mean_acceptance_length(empty) is None
    assert metrics.acceptance_rate(empty) is None
    assert metrics.acceptance_by_position(empty, num_speculative_tokens=3) == ()


def test_acceptance_by_position_is_over_all_cycles() -> None:
    stats = make_stats((3, 3), (3, 1), (3, 0), (1, 1))
    assert metrics.acceptance_by_position(stats, num_speculative_tokens=3) == (3 / 4, 1 / 4, 1 / 4)


def test_acceptance_by_position_adds_up_to_the_accepted_tokens() -> None:
    rng = random.Random(0)
    stats = make_stats(*[(7, rng.randint(0, 7)) for _ in range(200)])
    by_position = metrics.acceptance_by_position(stats, num_speculative_tokens=7)
    assert list(by_position) == sorted(by_position, reverse=True)
    assert sum(by_position) + 1 == pytest.approx(metrics.mean_acceptance_length(stats))


def test_acceptance_by_position_stops_at_the_positions_asked_for() -> None:
    assert metrics.acceptance_by_position(make_stats((7, 7)), num_speculative_tokens=2) == (1.0, 1.0)


def test_rejected_tokens_are_the_drafts_that_were_not_kept() -> None:
    assert metrics.num_rejected_tokens(make_stats((3, 1), (7, 7), (0, 0))) == 2


def test_pooling_is_a_ratio_of_sums_and_leaves_its_parts_alone() -> None:
    long, short = make_stats((3, 0), (3, 0), (3, 0)), make_stats((3, 3))
    pooled = metrics.pool([long, short])
    assert metrics.mean_acceptance_length(pooled) == 1 + 3 / 4  # not the mean of 1 and 4
    assert pooled.accepted_histogram == {0: 3, 3: 1}
    assert pooled.num_draft_tokens == 12
    assert short == make_stats((3, 3))
    assert metrics.pool([]) == AcceptanceStats()


def test_speedup_is_total_time_over_total_time() -> None:
    assert metrics.speedup(baseline_s=[4.0, 2.0], speculative_s=[1.0, 2.0]) == 2.0


@pytest.mark.parametrize(
    ("baseline_s", "speculative_s"), [([], []), ([1.0], [1.0, 1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0], [0.0])]
)
def test_speedup_refuses_times_that_are_not_of_the_same_requests(
    baseline_s: list[float], speculative_s: list[float]
) -> None:
    with pytest.raises(ValueError, match="speedup"):
        metrics.speedup(baseline_s=baseline_s, speculative_s=speculative_s)


def test_tokens_per_s() -> None:
    assert metrics.tokens_per_s(num_tokens=128, seconds=2.0) == 64.0
    assert metrics.tokens_per_s(num_tokens=1, seconds=0.0) is None


@pytest.mark.parametrize(
    ("tokens", "known"),
    [
        ([], False),
        ([1, 2, 3], False),
        ([1, 2, 3, 4], False),
        ([1, 2, 3, 4, 1, 2, 3, 4], True),
        ([1, 2, 3, 4, 1, 2, 3, 5], False),
        ([7, 7, 7, 7], False),
        ([7, 7, 7, 7, 7], True),  # the two 4-grams overlap
        ([0, 1, 2, 3, 4, 9, 1, 2, 3, 4], True),
    ],
)
def test_ends_known_ngram(tokens: list[int], known: bool) -> None:
    assert metrics.ends_known_ngram(tokens) is known


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ngram_seen_agrees_with_its_slow_twin_at_every_token(n: int) -> None:
    rng = random.Random(n)
    tokens = [rng.randint(0, 3) for _ in range(300)]
    seen = metrics.NgramSeen(n)
    for end in range(1, len(tokens) + 1):
        assert seen.push(tokens[end - 1]) is metrics.ends_known_ngram(tokens[:end], n)


def test_ngram_seen_refuses_an_empty_ngram() -> None:
    with pytest.raises(ValueError, match="n=0"):
        metrics.NgramSeen(0)


def test_a_fitted_trend_by_hand() -> None:
    trend = metrics.fitted_trend([0, 1, 2], [1, 3, 2])
    assert trend.slope == pytest.approx(0.5)
    assert trend.standard_error == pytest.approx(math.sqrt((2 - 0.5) / 2))
    assert metrics.fitted_trend([0, 2, 4], [5, 6, 7]) == metrics.Trend(0.5, 0.0)


def test_retention_compares_fifths() -> None:
    assert metrics.retention([10, 10, 99, 0, 50, 50, 50, 50, 5, 9]) == 0.7


def test_a_floor_rises_only_where_it_stays() -> None:
    assert metrics.floor_rise([1, 2, 1, 2, 1, 5, 4, 6, 5, 4]) == 3
    assert metrics.floor_rise([1, 2, 1, 2, 1, 5, 4, 6, 5, 1]) == 0
    assert metrics.floor_rise([5.0] * 10 + [4.0] * 10) == 0
    assert metrics.floor_rise([1.0] * 18 + [9.0] * 2) == 0  # too short to be a level


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.fitted_trend([1, 2], [1, 2]),
        lambda: metrics.fitted_trend([1, 1, 1], [1, 2, 3]),
        lambda: metrics.retention([1, 2, 3, 4]),
        lambda: metrics.floor_rise([1] * 9),
    ],
)
def test_series_that_are_too_short_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="here are"):
        call()


def test_percentile_is_a_value_that_was_seen() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert metrics.percentile(values, 0.5) == 3.0
    assert metrics.percentile(values, 0.99) == 5.0
    assert metrics.percentile(values, 0.2) == 1.0
    assert metrics.percentile(values, 0.21) == 2.0
    assert metrics.percentile([7.0], 0.01) == 7.0
    assert metrics.percentile([], 0.5) is None


def test_the_share_of_a_text_that_repeats() -> None:
    """Of 4-grams: nine of twelve tokens in threes begin one, three of these are the first of their kind."""
    assert metrics.repeated_share([1, 2, 3] * 4) == pytest.approx(1 - 3 / 9)
    assert metrics.repeated_share("abcdefgh") == 0.0
    assert metrics.repeated_share("abc") == 0.0
