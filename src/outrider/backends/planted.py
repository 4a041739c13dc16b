"""Truth to measure: scripts of known speed, acceptance, drift, cycle and losses, for tests of measuring tools."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.backends.scripted import Script, Step
from outrider.core import SamplingParams

_GOLDEN = 0.6180339887498949  # multiples of it fill [0, 1) evenly, so that few steps show the rates planted
_LETTER = ord("a")
_DEFAULT_TOKENS = 64
_SAME_BURST_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A plan for `ScriptedBackend`: every answer is as long as `max_tokens` lets it be."""

    acceptance_by_position: tuple[float, ...] = ()
    """Share of cycles that accept the draft token at each position, never rising; empty never drafts."""
    step_s: float = 0.0
    """Seconds of a cycle without drafts."""
    draft_token_s: float = 0.0
    """Seconds that each draft token adds to its cycle."""
    prefill_s: float = 0.0
    drift: float = 0.0
    """How much slower each request's cycles are than the first one's, as a share of it, request after request."""
    cycle: tuple[float, ...] = (1.0,)
    """Factors of the seconds of a cycle, one a request, in turn."""
    lost_every: int = 0
    """Every so many requests one fails half-way; 0 loses none."""

    @property
    def num_speculative_tokens(self) -> int:
        """The longest draft."""
        return len(self.acceptance_by_position)

    def cycle_s(self, draft_length: int) -> float:
        """Seconds of a cycle, before drift and cycle."""
        return self.step_s + draft_length * self.draft_token_s

    def acceptance_length(self, draft_length: int | None = None) -> float:
        """1 + the sum of the rates up to a draft length."""
        return 1 + sum(self.acceptance_by_position[:draft_length])

    def tokens_per_s(self, draft_length: int | None = None) -> float:
        """Decode speed, before drift and cycle."""
        length = self.num_speculative_tokens if draft_length is None else draft_length
        return self.acceptance_length(length) / self.cycle_s(length)

    def script(self, request_index: int, params: SamplingParams) -> Script:
        """One token after prefill, then cycles until `max_tokens`."""
        num_left = (params.max_tokens or _DEFAULT_TOKENS) - 1
        asked = params.num_speculative_tokens
        length = self.num_speculative_tokens if asked is None else min(asked, self.num_speculative_tokens)
        delay_s = self.cycle_s(length) * (1 + self.drift * request_index) * self.cycle[request_index % len(self.cycle)]
        steps = [Step((_LETTER,), delay_s=self.prefill_s)]
        while num_left > 0:
            share = ((request_index * 64 + len(steps)) * _GOLDEN) % 1
            num_accepted = sum(rate > share for rate in self.acceptance_by_position[:length])
            tokens = (_LETTER + len(steps) % 26,) * (num_accepted + 1)
            steps.append(Step(tokens, num_accepted, length, delay_s))
            num_left -= len(tokens)
        if self.lost_every and request_index % self.lost_every == self.lost_every - 1:
            return Script(tuple(steps[: len(steps) // 2 + 1]), error="planted loss")
        return Script(tuple(steps), finish_reason="length")


class Pace:
    """A `sleep` whose delays add up to what they should, though a busy machine ends each of them late."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep):
        self._clock, self._sleep = clock, sleep
        self._due_s = self._woken_s = float("-inf")

    def __call__(self, delay_s: float) -> None:
        """Wait so long after the last delay was due; after now where time passed in between."""
        now_s = self._clock()
        start_s = self._due_s if now_s - self._woken_s < _SAME_BURST_S else now_s
        self._due_s = start_s + delay_s
        self._sleep(max(0.0, self._due_s - now_s))
        self._woken_s = self._clock()
