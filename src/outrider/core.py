"""The nouns everything else speaks: sampling parameters, chunks, generations, acceptance. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.errors import RequestError

MAX_STOP_STRINGS = 16
GREEDY_TEMPERATURE = 1e-5  # at or below, a request is greedy; dividing logits by less overflows float32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. Names as in the OpenAI and vLLM APIs."""

    max_tokens: int | None = None
    """Most tokens to emit; None means up to the context limit."""
    temperature: float = 0.0
    """0 is greedy. Filters apply after it, in the order top-k, top-p, min-p, to target and drafter alike."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all. Ties with the k-th are kept."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the probability of the likeliest."""
    seed: int | None = None
    """With temperature > 0, decodes by match sampling: the same text with and without drafting."""
    stop_strings: tuple[str, ...] = ()
    """End the request where one of these appears in the text; it is not part of the result."""
    stop_token_ids: tuple[int, ...] = ()
    """End the request at one of these tokens, besides the model's own end tokens; emitted, but not part of the text."""
    ignore_eos: bool = False
    """Decode past the model's own end tokens."""
    num_speculative_tokens: int | None = None
    """Draft length for this request; None takes the engine's, 0 decodes plainly."""

    def __post_init__(self) -> None:
        """Refuse values that cannot mean anything, naming the field."""
        for name in ("stop_strings", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise RequestError(f"{name}={value!r} is not a list. Give a list, empty for none.")
            object.__setattr__(self, name, tuple(value))
        _check_number("temperature", self.temperature, low=0.0, high=100.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_integer("top_k", self.top_k, low=0)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, low=1)
        if self.num_speculative_tokens is not None:
            _check_integer("num_speculative_tokens", self.num_speculative_tokens, low=0)
        if self.seed is not None:
            _check_integer("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(f"stop_strings has {len(self.stop_strings)} entries; give at most {MAX_STOP_STRINGS}.")
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise RequestError("stop_strings holds an entry that is empty or not a string; remove it.")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, low=0)

    @property
    def is_greedy(self) -> bool:
        """True where the argmax is taken and nothing is drawn."""
        return self.temperature <= GREEDY_TEMPERATURE


def _check_number(name: str, value: float, *, low: float, high: float, low_open: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < low or value > high or (low_open and value == low):
        left = "(" if low_open else "["
        raise RequestError(f"{name}={value!r} is not a number in {left}{low:g}, {high:g}].")


def _check_integer(name: str, value: int, *, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name}={value!r} is not a whole number {bound}.")


@dataclass
class AcceptanceStats:
    """What drafting brought one request or a pool of them. Counted before any cut at a stop or limit."""

    num_cycles: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_histogram: dict[int, int] = field(default_factory=dict)  # {num_accepted_tokens: cycles}

    def record_cycle(self, *, draft_length: int, num_accepted_tokens: int) -> None:
        """Count one draft → verify → accept → commit round."""
        self.num_cycles += 1
        self.num_draft_tokens += draft_length
        self.num_accepted_tokens += num_accepted_tokens
        self.accepted_histogram[num_accepted_tokens] = self.accepted_histogram.get(num_accepted_tokens, 0) + 1


@dataclass(frozen=True)
class Chunk:
    """What one cycle (or prefill) added to one request."""

    request_index: int
    text: str
    token_ids: tuple[int, ...]
    num_accepted_draft_tokens: int
    """How many of `token_ids`, from the first, were drafted and accepted; the rest the target added itself."""
    finish_reason: str | None = None
    """None while running; then 'stop', 'length' or 'error'."""
    num_draft_tokens: int = 0
    """Drafts verified in the cycle; 0 for the first token and for plain decoding."""


@dataclass(frozen=True)
class Generation:
    """The finished answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    acceptance: AcceptanceStats
    prefill_s: float
    """Seconds from start to the first token of this request's batch."""
    decode_s: float
    """Seconds from the first token to the last."""


Prompt = str | Sequence[int]
