"""The paired design, held against planted truth.

Seen red: rounds taken for independent units, arms in blocks, an estimated spread taken for the true one, the t quantile
of a normal, the ratio upside down, a floor or a p value that `judge` does not look at.
"""

from __future__ import annotations

from math import exp, isnan, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.benchmarking import statistics as paired
from outrider.benchmarking.statistics import (
    PairedRatio,
    judge,
    log_ratios,
    mcnemar_exact,
    mean_interval,
    minimum_detectable_effect,
    noise_floor,
    paired_log_ratio,
    ratio_difference,
    recommended_num_prompts,
)
from tests.benchmarking.planted import Floats, blocks, places, seconds

NUM_RUNS = 1000


def num_covered(values: Floats, truth: float = 0.0, **settings: str) -> int:
    low, high = mean_interval(values, **settings)  # type: ignore[arg-type]
    return int(((low <= truth) & (truth <= high)).sum())


def test_an_arm_against_itself_is_covered_95_times_in_100() -> None:
    order = places(num_prompts=24, num_rounds=6)
    values = log_ratios(*seconds(np.random.default_rng(0), order, num_runs=NUM_RUNS))
    assert 935 <= num_covered(values) <= 965


def test_so_is_a_planted_speedup() -> None:
    order = places(num_prompts=24, num_rounds=6)
    values = log_ratios(*seconds(np.random.default_rng(1), order, num_runs=NUM_RUNS, speedup=1.5))
    assert 935 <= num_covered(values, log(1.5)) <= 965


def test_the_planted_drift_is_one_that_only_mirrored_orders_remove() -> None:
    order = blocks(num_prompts=24, num_rounds=6)
    values = log_ratios(*seconds(np.random.default_rng(0), order, num_runs=NUM_RUNS))
    assert num_covered(values) < 300


def test_rounds_are_no_units() -> None:
    """Taken one by one, 144 pairs look like more than the 24 prompts they come from."""
    baseline, other = seconds(np.random.default_rng(0), places(num_prompts=24, num_rounds=6), num_runs=NUM_RUNS)
    pairs = np.log(baseline / other).reshape(NUM_RUNS, -1)
    assert num_covered(pairs) < 930


def test_the_bootstrap_covers_with_many_prompts() -> None:
    """With 24 it takes about 92 in 100."""
    order = places(num_prompts=100, num_rounds=2)
    values = log_ratios(*seconds(np.random.default_rng(0), order, num_runs=200, speedup=1.5))
    assert 180 <= num_covered(values, log(1.5), method="bca") <= 199


def test_three_percent_is_found_nine_times_in_ten_with_the_prompts_recommended() -> None:
    """Each run asks for as many prompts as its own pilot, of an arm against itself, recommends."""
    random = np.random.default_rng(2)
    pilot = log_ratios(*seconds(random, places(num_prompts=24, num_rounds=6), num_runs=NUM_RUNS))
    spreads, which = np.unique(pilot.std(axis=1, ddof=1).round(4), return_inverse=True)
    wanted = np.array([recommended_num_prompts(0.03, log_sd=each, num_pilot=24) for each in spreads])[which]
    most = int(wanted.max())
    assert most < 80
    arms = seconds(random, places(num_prompts=most, num_rounds=6), num_runs=NUM_RUNS, speedup=1.03)
    values = log_ratios(*arms)
    num_found = 0
    for num_prompts in np.unique(wanted):
        low, _ = mean_interval(values[wanted == num_prompts, :num_prompts])
        num_found += int((low > 0).sum())
    assert 870 <= num_found <= 940  # many more than asked for would be waste


def test_a_ratio_with_its_interval_by_hand() -> None:
    """d = ln 2, ln 2, ln 4: mean 4/3 ln 2, s = ln 2 / √3, t(2) at 97.5 % = 4.3027."""
    found = paired_log_ratio([2.0, 6.0, 4.0], [1.0, 3.0, 1.0])
    half = 4.302652729911275 * log(2) / 3
    assert found.ratio == pytest.approx(2 ** (4 / 3))
    assert found.interval == pytest.approx((2 ** (4 / 3) * exp(-half), 2 ** (4 / 3) * exp(half)))
    assert found.log_sd == pytest.approx(log(2) / 3**0.5)
    assert found.p_value == pytest.approx(2 / 8)  # of eight ways to sign three values, two are as far from 0


def test_rounds_are_averaged_within_a_prompt() -> None:
    rounds = paired_log_ratio([[2.0, 8.0], [3.0, 3.0]], [[1.0, 1.0], [1.0, 3.0]])
    means = paired_log_ratio([4.0, 3**0.5], [1.0, 1.0])
    assert rounds.interval == pytest.approx(means.interval)
    assert rounds.num_prompts == 2


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.floats(0.1, 10))
def test_swapped_arms_give_the_reciprocal(times: list[float], factor: float) -> None:
    others = [factor * time**0.9 for time in times]
    forward, backward = paired_log_ratio(times, others), paired_log_ratio(others, times)
    assert forward.ratio == pytest.approx(1 / backward.ratio)
    assert forward.interval == pytest.approx([1 / limit for limit in reversed(backward.interval)])
    assert forward.p_value == pytest.approx(backward.p_value)


def test_equal_arms_have_no_width_and_no_evidence() -> None:
    for method in ("t", "bca"):
        found = paired_log_ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], method=method)  # type: ignore[arg-type]
        assert found.interval == (1.0, 1.0)
        assert found.p_value == 1.0
    assert noise_floor(found) == 0.0
    assert minimum_detectable_effect(log_sd=0.0, num_prompts=3) == 0.0


@pytest.mark.parametrize(
    ("a", "b"),
    [([1.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, float("nan")], [1.0, 1.0]), ([1.0, 2.0, 3.0], [1.0, 2.0])],
)
def test_what_cannot_be_paired_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"two or more|above 0|shapes"):
        paired_log_ratio(a, b)


def test_the_sign_flip_test_is_uniform_under_no_difference() -> None:
    values = stats.gamma.rvs(1.5, size=(400, 8), random_state=3) - stats.gamma.rvs(1.5, size=(400, 8), random_state=4)
    p_values = paired.sign_flip_p(values)
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    assert paired.sign_flip_p(np.ones(6)) == pytest.approx(2 / 64)  # the least that six can reach


def test_power_is_that_of_a_simulation_and_an_unknown_spread_costs_prompts() -> None:
    power = paired.detection_power(0.03, log_sd=0.04, num_prompts=12)
    drawn = stats.norm.rvs(log(1.03), 0.04, size=(20_000, 12), random_state=5)
    low, _ = mean_interval(drawn)
    assert power == pytest.approx(float((low > 0).mean()), abs=0.01)
    known = recommended_num_prompts(0.03, log_sd=0.04)
    estimated = recommended_num_prompts(0.03, log_sd=0.04, num_pilot=12)
    assert known == 22  # (1.960 + 1.282)² · (0.04 ÷ ln 1.03)² = 19.2 for a known spread, and 1.96² ÷ 2 more for t
    assert estimated is not None
    assert estimated > known


def test_recommendations_at_their_ends() -> None:
    assert recommended_num_prompts(0.5, log_sd=1e-6) == paired.MIN_PROMPTS
    assert recommended_num_prompts(1e-6, log_sd=1.0) is None
    large = recommended_num_prompts(0.001, log_sd=0.1, num_pilot=24)
    assert large is not None
    assert paired.detection_power(0.001, log_sd=0.1, num_prompts=large, num_pilot=24) >= 0.9


def test_the_least_effect_found_is_the_one_that_takes_so_many_prompts() -> None:
    least = minimum_detectable_effect(log_sd=0.04, num_prompts=24)
    assert least is not None
    assert recommended_num_prompts(least * 1.001, log_sd=0.04, num_pilot=24) == 24
    assert recommended_num_prompts(least * 0.97, log_sd=0.04, num_pilot=24) > 24  # type: ignore[operator]
    assert minimum_detectable_effect(log_sd=100.0, num_prompts=2) is None
    assert not isnan(minimum_detectable_effect(log_sd=1e-4, num_prompts=24) or float("nan"))


def test_mcnemar_and_what_so_many_pairs_leave_possible() -> None:
    assert mcnemar_exact(0, 0, num_pairs=24).p_value == 1.0
    assert mcnemar_exact(0, 0, num_pairs=24).max_discordance == pytest.approx(1 - 0.05 ** (1 / 24))
    assert mcnemar_exact(0, 0, num_pairs=150).max_discordance == pytest.approx(0.0198, abs=1e-4)
    assert mcnemar_exact(6, 0, num_pairs=24).p_value == pytest.approx(2 / 64)
    assert mcnemar_exact(1, 5, num_pairs=24).p_value == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar_exact(3, 3, num_pairs=24).p_value == 1.0
    for counts in ((-1, 0, 5), (3, 3, 5), (0, 0, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            mcnemar_exact(counts[0], counts[1], num_pairs=counts[2])


def ratio(
    low: float, middle: float, high: float, *, p_value: float = 0.001, num_prompts: int = 24, log_sd: float = 0.04
) -> PairedRatio:
    return PairedRatio(
        ratio=middle,
        interval=(low, high),
        confidence=0.95,
        method="t",
        p_value=p_value,
        num_prompts=num_prompts,
        log_sd=log_sd,
    )


@pytest.mark.parametrize(
    ("found", "floor", "kind", "said"),
    [
        (ratio(1.51, 1.58, 1.66), 0.02, "faster", "faster by 58.0 % (51.0 % to 66.0 %)"),
        (ratio(0.76, 0.8, 0.84), 0.02, "slower", "slower by 20.0 % (16.0 % to 24.0 %)"),
        (ratio(0.99, 1.0, 1.01, p_value=0.9), None, "equal", "no difference of 3.0 % or more"),
        (ratio(1.001, 1.02, 1.04, p_value=0.04), 0.025, "unresolved", "within the noise floor of 2.5 %"),
        (ratio(1.001, 1.02, 1.05, p_value=0.2), None, "unresolved", "none for a claim of 3.0 % ruled out"),
        (ratio(0.95, 1.02, 1.09, p_value=0.5, log_sd=0.17), None, "unresolved", "24; 391 would do"),
        (ratio(1.51, 1.58, 1.66, num_prompts=5), None, "unresolved", "not enough prompts for any claim: 5"),
        (ratio(0.5, 1.0, 2.0, p_value=1.0, log_sd=30.0), None, "unresolved", "no number would do"),
    ],
)
def test_verdicts(found: PairedRatio, floor: float | None, kind: str, said: str) -> None:
    verdict = judge(found, claim=0.03, floor=floor)
    assert verdict.kind == kind
    assert said in verdict.text


def test_five_prompts_are_told_how_many_would_do() -> None:
    assert judge(ratio(1.5, 1.6, 1.7, num_prompts=5, log_sd=0.001), claim=0.03).num_prompts == 6
    assert judge(ratio(1.5, 1.6, 1.7, num_prompts=5), claim=0.03).num_prompts > 20  # type: ignore[operator]


def test_two_prompts_at_a_high_confidence_have_limits_that_are_numbers() -> None:
    found = paired_log_ratio([1.0, 1.0], [1.0, 3.0], confidence=0.9999)
    assert 0 < found.interval[0] < found.interval[1] < np.inf
    assert np.isfinite(noise_floor(found))


def test_a_difference_of_ratios_of_sums_pairs_prompts() -> None:
    """With equal weights below it is the mean of paired differences, whose common part leaves."""
    hardness = np.array([1.0, 5.0, 2.0, 9.0, 4.0, 7.0, 3.0, 8.0])
    wobble = np.array([0.1, -0.1, 0.2, 0.0, -0.2, 0.1, 0.0, -0.1])
    ones = np.ones(8)
    found = ratio_difference(np.stack([hardness + 0.5 + wobble, ones], 1), np.stack([hardness, ones], 1))
    assert found.difference == pytest.approx(0.5)
    assert found.interval is not None
    low, high = found.interval
    assert 0.35 < low < 0.5 < high < 0.65
    assert found.num_prompts == 8


def test_a_difference_of_ratios_weighs_prompts_by_their_cycles() -> None:
    found = ratio_difference([[10, 10], [0, 30]], [[0, 10], [0, 30]])
    assert found.difference == pytest.approx(10 / 40)  # a mean of the prompts' ratios would be 1 / 2


def test_equal_arms_and_single_prompts_have_the_intervals_they_can_have() -> None:
    counts = [[3, 10], [4, 11], [9, 12]]
    same = ratio_difference(counts, counts)
    assert same.difference == 0
    assert same.interval == (0, 0)
    assert ratio_difference([[3, 10]], [[2, 10]]).interval is None
    for first, second in (([[1, 0]], [[1, 1]]), ([[1, 1]], [[1, 1], [2, 2]]), ([], [])):
        with pytest.raises(ValueError, match=r"paired by prompt|above 0 below"):
            ratio_difference(first, second)


def test_intervals_of_ratio_differences_cover_the_truth() -> None:
    random, num_covered_runs = np.random.default_rng(5), 0
    for _ in range(60):
        cycles = random.integers(20, 60, size=24)
        hardness = random.gamma(4.0, 0.25, size=24)
        first, second = (random.poisson(cycles * hardness * gain) for gain in (1.2, 1.0))
        truth = 0.2  # the mean of hardness is 1
        low, high = ratio_difference(np.stack([first, cycles], 1), np.stack([second, cycles], 1)).interval or (0, 0)
        num_covered_runs += low <= truth <= high
    assert num_covered_runs >= 51
