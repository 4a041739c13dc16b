"""The paired design: two arms on the same prompts, and what such a sample may claim.

A prompt is one unit. Its rounds share its text and are no independent draws, so they are averaged before anything is
estimated: d_i = mean over rounds of ln(a ÷ b). What is common to both arms of a pair (how hard the prompt is, how warm
the machine) leaves with the quotient; a drift within pairs leaves with mirrored orders (`compare.plan_turns`). All
intervals, tests and sample sizes are about the mean of d over prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp, isfinite, log, log1p
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

Floats = NDArray[np.float64]
Method = Literal["t", "bca"]

CONFIDENCE = 0.95
POWER = 0.9
MIN_PROMPTS = 6
"""With n prompts a sign-flip test cannot go below 2^(1−n); 6 is the first n for which that is under 0.05."""
NUM_RESAMPLES = 9999
MAX_LOG = 700.0
"""Of a ratio, either way: what lies beyond is written as e to this, since it has no number and means "anything"."""
NUM_SPREADS = 64  # quantiles that stand for what a spread may be, given its estimate
MAX_SHIFT = 30.0  # of a noncentral t: the power is 1 long before, and scipy has no value far beyond
MAX_PROMPTS = 1_000_000  # beyond, a recommendation is no help


@dataclass(frozen=True, kw_only=True)
class PairedRatio:
    """The geometric mean over prompts of a ÷ b, and how well it is known."""

    ratio: float
    interval: tuple[float, float]
    confidence: float
    method: Method
    p_value: float
    """Two-sided, of the sign-flip test of ratio 1."""
    num_prompts: int
    log_sd: float
    """Standard deviation over prompts of d, the log ratio."""


@dataclass(frozen=True, kw_only=True)
class RatioDifference:
    """Σa ÷ Σb of one arm less that of another, over the same prompts."""

    difference: float
    interval: tuple[float, float] | None
    """None for a single prompt."""
    confidence: float
    num_prompts: int


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """Two arms right or wrong on the same questions."""

    only_a: int
    only_b: int
    num_pairs: int
    p_value: float
    max_discordance: float
    """Upper confidence limit of the share of questions on which the arms differ: what so many pairs leave possible."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What may be claimed."""

    kind: Literal["faster", "slower", "equal", "unresolved", "invalid"]
    """`judge` never says "invalid": that is for those who know how the sample came about."""
    text: str
    """One sentence for people."""
    num_prompts: int | None
    """How many prompts a claim of the asked size takes; None where the sample cannot say."""


def log_ratios(a: ArrayLike, b: ArrayLike) -> Floats:
    """d = mean over rounds of ln(a ÷ b), from positive figures [..., prompts, rounds] to [..., prompts].

    ValueError for shapes that differ and for figures that are not positive and finite.
    """
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if first.shape != second.shape or first.ndim < 2:
        raise ValueError(f"arms are paired by prompt and round; here are shapes {first.shape} and {second.shape}")
    if not all(np.isfinite(each).all() and (each > 0).all() for each in (first, second)):
        raise ValueError("a ratio needs figures above 0; leave out what failed")
    return np.asarray(np.log(first / second).mean(axis=-1))


def mean_interval(values: Floats, *, confidence: float = CONFIDENCE, method: Method = "t") -> tuple[Floats, Floats]:
    """Confidence limits of the mean over the last axis, which has two values or more.

    "t" is mean ± t(n − 1) · s ÷ √n (Student 1908). "bca" is the bias-corrected, accelerated bootstrap over prompts
    (Efron 1987; scipy.stats.bootstrap), for ratios far from normal; with 24 prompts its 95 % are rather 92. Where the
    values leave it undefined, it is "t".
    """
    n = values.shape[-1]
    if n < 2:
        raise ValueError("an interval over prompts needs two or more")
    mean = values.mean(axis=-1)
    half = stats.t.ppf(0.5 + confidence / 2, n - 1) * values.std(axis=-1, ddof=1) / np.sqrt(n)
    if method == "t" or np.all(half == 0):  # a bootstrap of equal values is undefined
        return mean - half, mean + half
    found = stats.bootstrap(
        (values,),
        np.mean,
        axis=-1,
        vectorized=True,
        confidence_level=confidence,
        n_resamples=NUM_RESAMPLES,
        batch=100,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    is_known = np.isfinite(found.low) & np.isfinite(found.high)  # few or mostly equal values leave it undefined
    return np.where(is_known, found.low, mean - half), np.where(is_known, found.high, mean + half)


def bounded_exp(value: float | Floats) -> float:
    """A ratio from its logarithm, above 0 and finite whatever that is."""
    return exp(min(MAX_LOG, max(-MAX_LOG, float(value))))


def sign_flip_p(values: Floats) -> Floats:
    """Two-sided p of the mean over the last axis, where each sign was as likely the other one (Fisher 1935).

    Exact up to 13 values, by scipy.stats.permutation_test; beyond, 9,999 draws, the observed one counted as one more.
    """

    def mean_difference(x: Floats, y: Floats, axis: int) -> Any:
        return (x - y).mean(axis=axis)

    found = stats.permutation_test(
        (values / 2, -values / 2),
        mean_difference,
        permutation_type="samples",
        vectorized=True,
        n_resamples=NUM_RESAMPLES,
        batch=100,
        axis=-1,
        rng=np.random.default_rng(0),
    )
    return np.asarray(found.pvalue)


def paired_log_ratio(
    a: ArrayLike, b: ArrayLike, *, confidence: float = CONFIDENCE, method: Method = "t"
) -> PairedRatio:
    """a ÷ b over prompts, from positive figures [prompts] or [prompts, rounds]: exp of the mean of d and of its limits.

    For a speedup give seconds as (baseline, other) or speeds as (other, baseline). ValueError as `log_ratios`, and for
    fewer than two prompts.
    """
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if first.ndim == 1 and second.ndim == 1:
        first, second = first[:, None], second[:, None]
    values = log_ratios(first, second)
    low, high = mean_interval(values, confidence=confidence, method=method)
    return PairedRatio(
        ratio=bounded_exp(values.mean()),
        interval=(bounded_exp(low), bounded_exp(high)),
        confidence=confidence,
        method=method,
        p_value=float(sign_flip_p(values)),
        num_prompts=len(values),
        log_sd=float(values.std(ddof=1)),
    )


def ratio_difference(first: ArrayLike, second: ArrayLike, *, confidence: float = CONFIDENCE) -> RatioDifference:
    """The first arm's ratio of sums less the second's, from counts (a, b) [prompts, 2] of each, b above 0 in all.

    Prompts are resampled with their pairs kept, and ratios are formed of the resampled sums (BCa bootstrap, as
    `mean_interval`); where that is undefined, the interval is t's of the linearised differences
    d_i = (a_i − R·b_i) ÷ mean(b) (Cochran 1977, ratio estimates). ValueError for counts that do not pair.
    """
    one, two = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if one.shape != two.shape or one.ndim != 2 or one.shape[1] != 2 or not len(one):
        raise ValueError(f"arms are paired by prompt; here are shapes {one.shape} and {two.shape}")
    if not ((one[:, 1] > 0).all() and (two[:, 1] > 0).all()):
        raise ValueError("a ratio needs counts above 0 below it; leave out prompts without")

    def difference(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Floats:
        return np.asarray(a.sum(axis=axis) / b.sum(axis=axis) - c.sum(axis=axis) / d.sum(axis=axis))

    columns = (*one.T, *two.T)
    found, interval = float(difference(*columns)), None
    if len(one) > 1:
        linear = [
            (each[:, 0] - each[:, 0].sum() / each[:, 1].sum() * each[:, 1]) / each[:, 1].mean() for each in (one, two)
        ]
        low, high = mean_interval(linear[0] - linear[1], confidence=confidence)
        interval = found + float(low), found + float(high)
        if low < high:
            resampled = stats.bootstrap(
                columns,
                difference,
                paired=True,
                vectorized=True,
                confidence_level=confidence,
                n_resamples=NUM_RESAMPLES,
                batch=100,
                method="BCa",
                rng=np.random.default_rng(0),
            ).confidence_interval
            if isfinite(resampled.low) and isfinite(resampled.high):
                interval = float(resampled.low), float(resampled.high)
    return RatioDifference(difference=found, interval=interval, confidence=confidence, num_prompts=len(one))


def noise_floor(again: PairedRatio) -> float:
    """The largest difference, as a share, that a run of one arm against itself leaves possible.

    exp(max |ln limit|) − 1. What two equal arms may show is no finding about two others on this machine.
    """
    return exp(max(abs(log(limit)) for limit in again.interval)) - 1


def detection_power(
    effect: float, *, log_sd: float, num_prompts: int, num_pilot: int | None = None, confidence: float = CONFIDENCE
) -> float:
    """Chance that the t interval of `num_prompts` lies above ratio 1 where the true ratio is 1 + effect.

    1 − F(t; n − 1, δ√n ÷ σ), F being the noncentral t distribution and δ = ln(1 + effect) (Cohen 1988).
    Where `log_sd` was estimated from `num_pilot` prompts, this is averaged over σ² = s² · (m − 1) ÷ χ²(m − 1) (Julious
    and Owen 2006): with the estimate taken for the truth, "90 %" would be 87 or 88 for a pilot of 24.
    """
    if log_sd == 0:
        return 1.0
    spreads = log_sd * (np.ones(1) if num_pilot is None else _relative_spreads(num_pilot - 1))
    limit = stats.t.ppf(0.5 + confidence / 2, num_prompts - 1)
    shift = np.minimum(log1p(effect) * np.sqrt(num_prompts) / spreads, MAX_SHIFT)
    return float(stats.nct.sf(limit, num_prompts - 1, shift).mean())


@cache
def _relative_spreads(freedom: int) -> Floats:
    """σ ÷ s at evenly spaced quantiles of χ²."""
    shares = (np.arange(NUM_SPREADS) + 0.5) / NUM_SPREADS
    return np.asarray(np.sqrt(freedom / stats.chi2.ppf(shares, freedom)))


def recommended_num_prompts(
    effect: float, *, log_sd: float, num_pilot: int | None = None, power: float = POWER, confidence: float = CONFIDENCE
) -> int | None:
    """Fewest prompts, and no fewer than 6, that find a ratio of 1 + effect with this power; None beyond a million.

    The search starts at (z(1 − α/2) + z(power))² · σ² ÷ δ², which a t test always exceeds.
    """
    quantiles = stats.norm.ppf(0.5 + confidence / 2) + stats.norm.ppf(power)
    start = (quantiles * log_sd / log1p(effect)) ** 2
    num_prompts = max(MIN_PROMPTS, int(min(start, MAX_PROMPTS)))
    while num_prompts < MAX_PROMPTS:
        found = detection_power(
            effect, log_sd=log_sd, num_prompts=num_prompts, num_pilot=num_pilot, confidence=confidence
        )
        if found >= power:
            return num_prompts
        num_prompts += max(1, num_prompts // 200)
    return None


def minimum_detectable_effect(
    *, log_sd: float, num_prompts: int, power: float = POWER, confidence: float = CONFIDENCE
) -> float | None:
    """The smallest share by which a ratio exceeds 1 and is found with this power, by as many prompts as gave `log_sd`.

    None where it is over a thousandfold.
    """

    def missing(effect: float) -> float:
        return power - detection_power(
            effect, log_sd=log_sd, num_prompts=num_prompts, num_pilot=num_prompts, confidence=confidence
        )

    if log_sd == 0:
        return 0.0
    if missing(1e3) > 0:
        return None
    return float(optimize.brentq(missing, 0.0, 1e3, xtol=1e-9))


def mcnemar_exact(only_a: int, only_b: int, *, num_pairs: int, confidence: float = CONFIDENCE) -> McNemar:
    """McNemar's test, exact: `only_a` questions only a had right, `only_b` only b, of `num_pairs` asked of both.

    p = min(1, 2 · P[Bin(b + c, ½) ≤ min(b, c)]). The bound is Clopper and Pearson's (1934), one-sided: 1 −
    (1 − confidence)^(1 ÷ n), about 3 ÷ n, where the arms never differed. ValueError for counts that do not fit.
    """
    num_discordant = only_a + only_b
    if min(only_a, only_b) < 0 or num_pairs < max(1, num_discordant):
        raise ValueError(f"{only_a} and {only_b} of {num_pairs} pairs do not fit together")
    p_value = stats.binomtest(only_a, num_discordant, 0.5).pvalue if num_discordant else 1.0
    bound = stats.binomtest(num_discordant, num_pairs, alternative="less").proportion_ci(confidence, "exact").high
    return McNemar(
        only_a=only_a, only_b=only_b, num_pairs=num_pairs, p_value=float(p_value), max_discordance=float(bound)
    )


def judge(found: PairedRatio, *, claim: float, floor: float | None = None, power: float = POWER) -> Verdict:
    """What `found`, a speedup, allows one to say where differences from `claim` up (a share: 0.03 is 3 %) matter.

    "faster" and "slower" need six prompts, an interval without 1, a sign-flip p to match and a difference beyond the
    noise `floor`. "equal" needs the interval within the claim on both sides. All else is "unresolved".
    """
    needed = recommended_num_prompts(
        claim, log_sd=found.log_sd, num_pilot=found.num_prompts, power=power, confidence=found.confidence
    )
    low, high = found.interval
    if found.num_prompts < MIN_PROMPTS:
        wanted = max(MIN_PROMPTS, needed or MIN_PROMPTS)
        text = f"not enough prompts for any claim: {found.num_prompts}, and {MIN_PROMPTS} are the least"
        return Verdict(kind="unresolved", text=text, num_prompts=wanted)
    excess = max(found.ratio, 1 / found.ratio) - 1
    is_apart = not low <= 1 <= high and found.p_value <= 1 - found.confidence
    if is_apart and floor is not None and excess <= floor:
        text = f"a difference of {_percent(excess)} is within the noise floor of {_percent(floor)}: no claim"
        return Verdict(kind="unresolved", text=text, num_prompts=needed)
    if is_apart and found.ratio > 1:
        text = f"faster by {_percent(found.ratio - 1)} ({_percent(low - 1)} to {_percent(high - 1)})"
        return Verdict(kind="faster", text=text, num_prompts=needed)
    if is_apart:
        text = f"slower by {_percent(1 - found.ratio)} ({_percent(1 - high)} to {_percent(1 - low)})"
        return Verdict(kind="slower", text=text, num_prompts=needed)
    if 1 / (1 + claim) < low and high < 1 + claim:
        text = f"no difference of {_percent(claim)} or more"
        return Verdict(kind="equal", text=text, num_prompts=needed)
    return Verdict(kind="unresolved", text=_too_few(found, claim, needed), num_prompts=needed)


def _too_few(found: PairedRatio, claim: float, needed: int | None) -> str:
    asked = f"for a claim of {_percent(claim)}"
    if needed is None:
        return f"not enough prompts {asked}, and no number would do: arms differ too much from prompt to prompt"
    if needed <= found.num_prompts:
        return (
            f"no difference shown, and none {asked} ruled out; run it again with twice the {found.num_prompts} prompts"
        )
    return f"not enough prompts {asked}: {found.num_prompts}; {needed} would do"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if isfinite(share) else "no known share"
