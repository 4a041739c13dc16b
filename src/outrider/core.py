"""The nouns everything else speaks: sampling parameters, chunks, generations, acceptance. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20  # as OpenAI's top_logprobs
MAX_LOGIT_BIAS = 100.0
GREEDY_TEMPERATURE = 1e-5  # at or below, a request is greedy; dividing logits by less overflows float32


GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "ebnf", "structural_tag")
MAX_GRAMMAR_CHARACTERS = 100_000


@dataclass(frozen=True)
class Grammar:
    """What an answer must match as a whole, whatever the target would rather write."""

    kind: str
    """'json_schema' (properties that it does not name are not written), 'json_object', 'regex', xgrammar's 'ebnf', or
    'structural_tag' (xgrammar's JSON, which may spell the request's `shown_token_ids`)."""
    text: str = ""
    """Empty for 'json_object'."""

    def __post_init__(self) -> None:
        """Refuse kinds that do not exist; what the text means is checked where it is compiled."""
        if self.kind not in GRAMMAR_KINDS:
            raise RequestError(f"grammar kind {self.kind!r} is not known. Use one of {', '.join(GRAMMAR_KINDS)}.")
        if not isinstance(self.text, str) or len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(f"the grammar's text is not a string of at most {MAX_GRAMMAR_CHARACTERS} characters.")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. Names as in the OpenAI and vLLM APIs.

    From allowed_token_ids to repetition_penalty the fields change the target's logits before temperature and filters,
    in the order of `engine/adjustments.py`; "generated" is the answer so far, without the prompt.
    """

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
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be written, end tokens included; None allows all."""
    bad_words: tuple[str, ...] = ()
    """Never written, as the tokenizer spells them with and without a space before; other spellings are not looked for.
    A word may begin in the prompt unnoticed."""
    min_tokens: int = 0
    """So many tokens are generated before an end or stop token may be; stop strings are not looked for in those."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these token ids, -100 to 100."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token generated before."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for each time it was generated before."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by it where positive, multiplied where negative; 1 is none."""
    grammar: Grammar | None = None
    """What the answer must match; it comes after the adjustments and wins where they would leave it nothing."""
    shown_token_ids: tuple[int, ...] = ()
    """Control tokens that are spelled out in the text, for a reader who parses it; the others are left out."""
    logprobs: int | None = None
    """Report the chosen token's raw log-probability and that of so many likeliest tokens; None reports nothing."""

    def __post_init__(self) -> None:
        """Refuse values that cannot mean anything, naming the field."""
        for name in ("stop_strings", "stop_token_ids", "shown_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if name == "allowed_token_ids" and value is None:
                continue
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
        for token_id in self.shown_token_ids:
            _check_integer("shown_token_ids", token_id, low=0)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar={self.grammar!r} is not a Grammar.")
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        for name, low, high in (
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.01, 100.0),
        ):
            _check_number(name, getattr(self, name), low=low, high=high)
        _check_integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}. Lower it.")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty, so that nothing may be written. Give None to allow all.")
        for token_id in self.allowed_token_ids or ():
            _check_integer("allowed_token_ids", token_id, low=0)
        if any(not isinstance(text, str) or not text.strip() for text in self.bad_words):
            raise RequestError("bad_words holds an entry that is blank or not a string; remove it.")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias={self.logit_bias!r} does not map token ids to numbers.")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            _check_integer("a token id of logit_bias", token_id, low=0)
            _check_number(f"logit_bias of token {token_id}", bias, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)

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
class TokenLogprobs:
    """One emitted token in the target's own distribution: raw, before adjustments, temperature and filters."""

    token_id: int
    raw_logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest token ids with their raw log-probabilities, best first; the emitted one need not be among them."""


@dataclass(frozen=True)
class RequestSummary:
    """What is known of a request once it has ended."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose keys and values an earlier request had left."""
    num_output_tokens: int
    acceptance: AcceptanceStats
    error: str | None = None
    """Why it failed; None unless its finish reason is 'error'."""
    synthetic: bool = False
    """True where acceptance was drawn and not judged: the text is not the target's."""


@dataclass(frozen=True)
class Chunk:
    """What one cycle (or prefill) added to one request."""

    request_index: int
    text: str
    token_ids: tuple[int, ...]
    num_accepted_draft_tokens: int
    """How many of `token_ids`, from the first, were drafted and accepted; the rest the target added itself."""
    finish_reason: str | None = None
    """None while running; then 'stop', 'length', 'abort' or 'error'."""
    num_draft_tokens: int = 0
    """Drafts verified in the cycle; 0 for the first token and for plain decoding."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids` if the request asked for them."""
    summary: RequestSummary | None = None
    """With the last chunk of a request, from backends that serve."""


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
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids` if the request asked for them."""
    synthetic: bool = False
    """True where acceptance was drawn and not judged: the text is not the target's."""


Prompt = str | Sequence[int]
