"""One answer as a client saw it come: its chunks, its times and its counts.

Tokens come from the server's usage and never from counting stream chunks: where drafts are accepted, one chunk carries
several tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MAX_ERROR_CHARACTERS = 300
_BROKEN_ENDS = ("abort", "error")
"""Finish reasons of answers that a server gave up."""
LEAST_WHOLE_S, LEAST_DECODE_SHARE, LEAST_PACE_S = 0.1, 0.05, 1e-4
"""A longer answer, decoded in less than this share of its time and faster than a token in so many seconds, came out of
a buffer: what was timed is the buffer, not the server."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer as the client saw it. Times in seconds; an error leaves what had come until then."""

    started_s: float
    """When it was sent, on the monotonic clock."""
    ttft_s: float | None
    """Sent to the first chunk that carries a token; None if none came."""
    chunk_gaps_s: tuple[float, ...]
    """Between consecutive chunks that carry tokens, each of which may carry several."""
    e2e_s: float
    """Sent to the last chunk."""
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    """From the server's usage; None if it gave none."""
    num_chunks: int
    text: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str | None
    error: str | None
    acceptance: dict[str, Any] | None
    """The response's `metrics.speculative_decoding`."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the server had in its prefix cache, from usage; None if it does not say."""
    num_first_tokens: int | None = None
    """Tokens of the first chunk, from the running usage; None where the server gives usage only at the end."""

    @property
    def is_buffered(self) -> bool:
        """Whether its chunks came all at once, so that nothing is known of decoding."""
        if self.ttft_s is None or self.num_chunks < 2 or not self.num_output_tokens or self.e2e_s < LEAST_WHOLE_S:
            return False
        decode_s = self.e2e_s - self.ttft_s
        return decode_s < LEAST_DECODE_SHARE * self.e2e_s and decode_s < LEAST_PACE_S * (self.num_output_tokens - 1)

    @property
    def tpot_s(self) -> float | None:
        """(e2e − TTFT) ÷ (tokens − 1), as vLLM defines it; None for fewer than two tokens, a single chunk or a buffer.

        The last is `is_buffered`.
        """
        if self.ttft_s is None or self.num_output_tokens is None or self.num_output_tokens < 2 or self.num_chunks < 2:
            return None
        return None if self.is_buffered else (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: tokens after the first chunk ÷ seconds from the first chunk to the last (T-062).

        None for a single chunk, a buffer, and where the server does not say how many tokens its first chunk had.
        """
        is_timed = self.chunk_gaps_s and not self.is_buffered
        if self.num_output_tokens is None or self.num_first_tokens is None or not is_timed:
            return None
        decode_s = sum(self.chunk_gaps_s)
        return (self.num_output_tokens - self.num_first_tokens) / decode_s if decode_s > 0 else None


class Answer:
    """An answer as it grows."""

    def __init__(self, started_s: float) -> None:
        self.error: str | None = None
        self.has_events = False
        """Whether any event came, well-formed or not."""
        self._started_s, self._last_s = started_s, started_s
        self._times_s: list[float] = []
        self._usage: dict[str, int] = {}
        self._num_counted = 0
        self._num_first: int | None = None
        self._is_counted: bool | None = None  # whether usage runs along, which the first chunk with a token shows
        self._text, self._reasoning = "", ""
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish_reason: str | None = None
        self._acceptance: dict[str, Any] | None = None

    def push(self, event: dict[str, Any], now_s: float) -> None:
        """Take one event that came at a time."""
        self.has_events = True
        if event.get("error"):
            self.error = error_message(event["error"])
            return
        self._acceptance = _acceptance(event.get("metrics")) or self._acceptance
        usage = _usage(event.get("usage") or {})
        self._usage |= usage
        if not event.get("choices"):
            return
        self._last_s = now_s
        has_text = self._push_choice(event["choices"][0])
        num_counted = usage.get("completion_tokens") or 0
        if self._is_counted is None and (has_text or num_counted):
            self._is_counted = bool(num_counted)
            self._num_first = num_counted or None
        if num_counted > self._num_counted if self._is_counted and num_counted else has_text:
            self._times_s.append(now_s)
        self._num_counted = max(num_counted, self._num_counted)

    def _push_choice(self, choice: dict[str, Any]) -> bool:
        """Whether it carries text of any kind."""
        delta = choice.get("delta") or {}
        text = (delta.get("content") if "delta" in choice else choice.get("text")) or ""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        calls = delta.get("tool_calls") or []
        for call in calls:
            self._push_call(call)
        self._text, self._reasoning = self._text + text, self._reasoning + reasoning
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return bool(text or reasoning or calls)

    def _push_call(self, call: dict[str, Any]) -> None:
        index = call.get("index", 0)
        if type(index) is not int:
            raise TypeError(f"the index of a call is {index!r}")
        known = self._calls.setdefault(index, {"id": None, "name": "", "arguments": ""})
        function = call.get("function") or {}
        known["id"] = call.get("id") or known["id"]
        known["name"] += function.get("name") or ""
        known["arguments"] += function.get("arguments") or ""

    def sample(self, now_s: float) -> Sample:
        """What there is, now that no more comes."""
        if self.error is None and self._finish_reason is None:
            self.error = "the stream ended without a finish reason: the answer was lost on its way"
        if self.error is None and self._finish_reason in _BROKEN_ENDS:
            self.error = f"the server gave the answer up: its finish reason is {self._finish_reason!r}"
        ended_s = now_s if self.error else self._last_s
        return Sample(
            started_s=self._started_s,
            ttft_s=self._times_s[0] - self._started_s if self._times_s else None,
            chunk_gaps_s=tuple(later - earlier for earlier, later in pairwise(self._times_s)),
            e2e_s=ended_s - self._started_s,
            num_prompt_tokens=self._usage.get("prompt_tokens"),
            num_output_tokens=self._usage.get("completion_tokens"),
            num_chunks=len(self._times_s),
            text=self._text,
            reasoning=self._reasoning,
            tool_calls=tuple(call for _, call in sorted(self._calls.items())),
            finish_reason=self._finish_reason,
            error=self.error,
            acceptance=self._acceptance,
            num_cached_tokens=self._usage.get("cached_tokens"),
            num_first_tokens=self._num_first,
        )


def _usage(told: dict[str, Any]) -> dict[str, int]:
    """The counts that it has; TypeError for one that is no count."""
    counts = {name: told.get(name) for name in ("prompt_tokens", "completion_tokens")}
    counts["cached_tokens"] = (told.get("prompt_tokens_details") or {}).get("cached_tokens")
    for name, count in counts.items():
        if count is not None and not _is_count(count):
            raise TypeError(f"{name} of its usage is {count!r}")
    return {name: count for name, count in counts.items() if count is not None}


def _acceptance(told: Any) -> dict[str, Any] | None:
    """`speculative_decoding` of a response's metrics; None where that is another server's field with other things."""
    found = told.get("speculative_decoding") if isinstance(told, dict) else None
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    return found if isinstance(found, dict) and all(_is_count(found.get(name)) for name in names) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def event_lines(parts: Iterator[str]) -> Iterator[str]:
    """Lines of an event stream, which CR, LF or both end; a text inside an event may hold other line separators."""
    left = ""
    for part in parts:
        text = (left + part).replace("\r\n", "\n")
        is_cut = text.endswith("\r")  # its LF may be about to come
        *whole, left = text.removesuffix("\r").replace("\r", "\n").split("\n")
        left += "\r" if is_cut else ""
        yield from whole
    yield from left.rstrip("\r").split("\n") if left else ()


def error_message(error: Any) -> str:
    """The words of an error as servers write it: an object with a message, or anything."""
    return str(error.get("message", error) if isinstance(error, dict) else error)[:MAX_ERROR_CHARACTERS]
