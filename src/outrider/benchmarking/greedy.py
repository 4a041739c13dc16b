"""Greedy texts of one server with and without drafting, or of two servers, read with log-probabilities and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.flips import (
    Difference,
    FlipCount,
    Scored,
    Token,
    count_flips,
    first_difference,
    largest_shift,
)
from outrider.benchmarking.workloads import DEMO
from outrider.errors import EngineFault

PROMPTS = DEMO.prompts[::6]
"""A text, a letter, code and a list to go on with."""
MAX_SHIFT = 1.0
"""Rounding moves the log-probability of a likely token by less; more is a fault, and no measure of ties."""
_ID_PREFIX = "token_id:"


@dataclass(frozen=True, kw_only=True)
class GreedyComparison:
    """What pairs of greedy texts show."""

    count: FlipCount
    differences: tuple[tuple[int, Difference], ...]
    """The first difference of each pair that has one, with the index of its prompt."""
    shift: float
    """How far one token's log-probability is apart in the two, at most, where both have read the same text."""
    tolerance: float
    """The largest gap that was called a tie."""
    is_measured: bool
    """Whether the tolerance is what these texts show, and was not given."""

    @property
    def fault(self) -> str | None:
        """The first fault, with how many there are, for people; None where rounding explains all."""
        first = next((str(each) for _, each in self.differences if each.verdict == "fault"), None)
        if first is not None:
            return f"{first}; {self._counted}, where gaps up to {self.tolerance:.4f} are ties"
        if self.is_measured and self.shift > MAX_SHIFT:
            return f"log-probabilities of the same text are {self.shift:.2f} apart, which rounding does not do"
        return None

    def __str__(self) -> str:
        """For people, where there is no fault."""
        if not self.differences:
            return f"{self._counted}, log-probabilities at most {self.shift:.2g} apart"
        return f"{self._counted}, gaps up to {self.count.largest_gap or 0.0:.4f}; the first: {self.differences[0][1]}"

    @property
    def _counted(self) -> str:
        count, rate = self.count, self.count.rate or 0.0
        return (
            f"{count.num_faults} faults and {count.num_ties} ties in {count.num_positions} tokens ({100 * rate:.2f} %)"
        )


def compare_greedy(
    plain: Sequence[Sequence[Scored]], drafted: Sequence[Sequence[Scored]], *, tolerance: float | None = None
) -> GreedyComparison:
    """Judge each pair by its first difference, the plain texts being the reference.

    Without a `tolerance` it is twice the shift seen, since each of two log-probabilities may be off by that much: 0 on
    a server that is exact.
    """
    pairs = list(zip(plain, drafted, strict=True))
    shift = max((largest_shift(first, second) for first, second in pairs), default=0.0)
    allowed = 2 * shift if tolerance is None else tolerance
    found, compared = list[tuple[int, Difference]](), list[tuple[int, Difference | None]]()
    for index, (first, second) in enumerate(pairs):
        difference = first_difference(first, [scored.token for scored in second], tolerance=allowed)
        if difference is not None:
            found.append((index, difference))
        compared.append((len(first) if difference is None else difference.position + 1, difference))
    return GreedyComparison(
        count=count_flips(compared),
        differences=tuple(found),
        shift=shift,
        tolerance=allowed,
        is_measured=tolerance is None,
    )


def read_greedy(
    client: ServerClient, prompts: Sequence[str], *, max_tokens: int, fields: dict[str, Any] | None = None
) -> list[list[Scored]]:
    """Texts of `max_tokens` tokens, with the two likeliest at each; no tokens where the server scores none.

    `fields` go into the body. EngineFault where the server refuses or does not answer.
    """
    return [_read(client, prompt, max_tokens, fields or {}) for prompt in prompts]


def _read(client: ServerClient, prompt: str, max_tokens: int, fields: dict[str, Any]) -> list[Scored]:
    body = {"model": client.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2}
    named = {"ignore_eos": True, "return_tokens_as_token_ids": True}  # texts end alike; no two tokens look the same
    status, value = client.post_json("/v1/completions", {**body, **named, **fields})
    try:
        logprobs = value["choices"][0].get("logprobs") or {}
        tokens, tops = logprobs.get("tokens") or [], logprobs.get("top_logprobs") or []
        return [Scored(_token(token), _top(top)) for token, top in zip(tokens, tops, strict=bool(tops))]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise EngineFault(
            f"{client.base_url}/v1/completions answers a request for log-probabilities with HTTP {status} and "
            f"{str(value)[:200]}. See the server's log."
        ) from None


def _top(values: dict[str, float]) -> tuple[tuple[Token, float], ...]:
    return tuple(sorted(((_token(text), value) for text, value in values.items()), key=lambda each: -each[1]))


def _token(text: str) -> Token:
    number = text.removeprefix(_ID_PREFIX)
    return int(number) if number != text and number.isdecimal() else text
