"""Two greedy texts of one prompt that part: a tie that rounding decided, or a fault? No torch.

Reading several tokens in one pass may round differently from reading them one by one, so that near-equal logits swap.
A swap of the reference's two likeliest tokens whose gap is within the tolerance is a tie; any other is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Token = int | str
"""A token id; the token's text where a server does not name ids."""
Top = tuple[tuple[Token, float], ...]
"""The likeliest tokens with their logits or log-probabilities, best first; gaps are the same in both."""


@dataclass(frozen=True)
class Scored:
    """One token of a greedy text, and what its writer thought likeliest there."""

    token: Token
    top: Top
    """Two entries at least, or a difference here cannot be called a tie."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A position at which another run has another token than the reference."""

    position: int
    """Tokens before it, which both have."""
    reference: Token | None
    """None where the reference has ended."""
    other: Token | None
    """None where the other has ended."""
    top: Top
    """The reference's two likeliest."""
    gap: float | None
    """Between those two; None where they are not known."""
    verdict: Literal["tie", "fault"]

    def __str__(self) -> str:
        """For people."""
        if self.reference is None or self.other is None:
            early, late = ("the other", "the reference") if self.other is None else ("the reference", "the other")
            return f"fault: {early} ends after {self.position} tokens and {late} goes on"
        likeliest = ", ".join(f"{token!r} {value:.4f}" for token, value in self.top) or "unknown"
        gap = "" if self.gap is None else f", a gap of {self.gap:.4f}"
        return (
            f"{self.verdict} at token {self.position + 1}: {self.reference!r} in the reference and {self.other!r} in "
            f"the other; likeliest {likeliest}{gap}"
        )


@dataclass(frozen=True, kw_only=True)
class FlipCount:
    """How often texts part, which the worst gap alone does not say."""

    num_positions: int
    """Positions compared: of each pair all that both have, as far as the comparison went."""
    num_ties: int
    num_faults: int
    largest_gap: float | None
    """Of all flips whose gap is known."""

    @property
    def rate(self) -> float | None:
        """Flips ÷ positions compared; None where there were none."""
        return (self.num_ties + self.num_faults) / self.num_positions if self.num_positions else None

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        return {**asdict(self), "rate": self.rate}


def differences(reference: Sequence[Scored], other: Sequence[Token], *, tolerance: float) -> Iterator[Difference]:
    """Every position at which they differ, in order; a text that ends early is one, at its end, and a fault.

    `tolerance` is the largest gap that rounding explains, in logits. Where `other` was written freely only the first
    difference means anything, for after it the two have read different texts; where both read one given text, all do.
    """
    for position, (scored, token) in enumerate(zip(reference, other, strict=False)):
        if scored.token != token:
            yield _judged(position, scored, token, tolerance)
    shorter = min(len(reference), len(other))
    if len(reference) > shorter:
        left = reference[shorter]
        yield _at(shorter, left.token, None, left.top, is_tie=False)
    elif len(other) > shorter:
        yield _at(shorter, None, other[shorter], (), is_tie=False)


def first_difference(reference: Sequence[Scored], other: Sequence[Token], *, tolerance: float) -> Difference | None:
    """Where two texts part; None where they are the same to the end of both."""
    return next(differences(reference, other, tolerance=tolerance), None)


def count_flips(pairs: Iterable[tuple[int, Difference | None]]) -> FlipCount:
    """Pool pairs of (positions compared, difference found there or None)."""
    known = list(pairs)
    found = [difference for _, difference in known if difference is not None]
    verdicts = [difference.verdict for difference in found]
    return FlipCount(
        num_positions=sum(num for num, _ in known),
        num_ties=verdicts.count("tie"),
        num_faults=verdicts.count("fault"),
        largest_gap=max((difference.gap for difference in found if difference.gap is not None), default=None),
    )


def largest_shift(reference: Sequence[Scored], other: Sequence[Scored]) -> float:
    """How far one token's value is apart in two runs, at most, while both have read the same text; 0 without any.

    Positions before the first difference count: the values at it would excuse whatever happened there.
    """
    largest = 0.0
    for first, second in zip(reference, other, strict=False):
        if first.token != second.token:
            break
        values = dict(second.top)
        largest = max([largest, *(abs(value - values[token]) for token, value in first.top if token in values)])
    return largest


def _judged(position: int, scored: Scored, token: Token, tolerance: float) -> Difference:
    top = scored.top[:2]
    is_tie = len(top) == 2 and token in (top[0][0], top[1][0]) and top[0][1] - top[1][1] <= tolerance
    return _at(position, scored.token, token, top, is_tie=is_tie)


def _at(position: int, reference: Token | None, other: Token | None, top: Top, *, is_tie: bool) -> Difference:
    return Difference(
        position=position,
        reference=reference,
        other=other,
        top=top[:2],
        gap=top[0][1] - top[1][1] if len(top) >= 2 else None,
        verdict="tie" if is_tie else "fault",
    )
