"""A serving backend that says what it was told to: for tests of servers and clients. No torch, no weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as JsonTokenizer

from outrider.backends.base import Gauges, Speculation
from outrider.core import AcceptanceStats, Chunk, RequestSummary, SamplingParams, TokenLogprobs
from outrider.errors import OutriderError, RequestError
from outrider.metrics import pool
from outrider.tokenizer import IncrementalDecoder, Tokenizer

FIRST_SPECIAL_ID = 256
SPECIAL_TOKENS = (
    "<bos>",
    "<eos>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<mask>",
    "<|image|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|turn>",
    "<|tool>",
    "<tool|>",
    '<|"|>',
    "<|think|>",
)
END_TOKENS = ("<eos>", "<turn|>")
_PAGE_TOKENS = 16
_TOP_LOGPROBS = tuple(range(97, 97 + 26))  # the likeliest tokens, as a script reports them: a, b, c, …


def byte_tokenizer() -> Tokenizer:
    """Ids 0–255 are bytes, those from 256 on `SPECIAL_TOKENS`, spelled as Gemma 4 spells its control tokens.

    ASCII characters are tokens of their own, other characters runs of byte tokens, which come out when they end.
    """
    vocabulary = {chr(byte) if byte < 128 else f"<0x{byte:02X}>": byte for byte in range(FIRST_SPECIAL_ID)}
    backend = JsonTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    eos_ids = tuple(FIRST_SPECIAL_ID + SPECIAL_TOKENS.index(text) for text in END_TOKENS)
    return Tokenizer(backend, bos_id=FIRST_SPECIAL_ID, eos_ids=eos_ids)


@dataclass(frozen=True)
class Step:
    """What one cycle adds: token ids, of which the first `num_accepted_draft_tokens` were drafted."""

    token_ids: tuple[int, ...]
    num_accepted_draft_tokens: int = 0
    num_draft_tokens: int = 0
    delay_s: float = 0.0
    """Waited before the step."""


@dataclass(frozen=True)
class Script:
    """One answer: its steps, and how it ends."""

    steps: tuple[Step, ...]
    finish_reason: str = "stop"
    error: str | None = None
    """Ends with finish reason "error" and this message instead."""
    repeats: bool = False
    """Begins again after its last step, until it is cancelled or reaches max_tokens."""
    refusal: OutriderError | None = None
    """Raised by `submit` instead of any step."""
    num_cached_tokens: int = 0

    @property
    def num_speculative_tokens(self) -> int:
        """Its longest draft."""
        return max((step.num_draft_tokens for step in self.steps), default=0)

    @staticmethod
    def of_text(text: str, *, block_tokens: int = 4, drafted: bool = True, **options: object) -> Script:
        """A text in blocks of so many tokens, all but the last of each drafted and accepted, then the end of the turn.

        Control tokens are written as `SPECIAL_TOKENS` spells them; `options` are fields of Script.
        """
        tokenizer = byte_tokenizer()
        token_ids = [*tokenizer.encode(text, add_bos=False), tokenizer.eos_ids[-1]]
        blocks = [tuple(token_ids[at : at + block_tokens]) for at in range(0, len(token_ids), block_tokens)]
        steps = [Step(block, len(block) - 1, block_tokens - 1) if drafted else Step(block) for block in blocks]
        return Script(tuple(steps), **options)  # type: ignore[arg-type]


class Plan(Protocol):
    """Writes a script for each request as it comes: see `backends/planted.py`."""

    @property
    def num_speculative_tokens(self) -> int:
        """The longest draft it plans."""
        ...

    def script(self, request_index: int, params: SamplingParams) -> Script:
        """What the request is answered."""
        ...


@dataclass
class _Running:
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    script: Script
    on_chunk: Callable[[Chunk], None]
    decoder: IncrementalDecoder
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    num_steps: int = 0
    num_output_tokens: int = 0
    is_cancelled: bool = False


class ScriptedBackend:
    """Answers each prompt with the first script whose key its text contains; the key "" matches every prompt.

    A plan in a script's place writes one for each request. With a `prefix_page_tokens` above 0 a prompt counts as
    cached as far as an earlier one began with the same tokens, in whole pages of so many.

    Requests take turns, a step each, on one thread. `max_tokens` and `num_speculative_tokens=0` hold, `logprobs` are
    made up, stop strings and grammars are the script's own affair. `submitted`, `boundaries` and `finish_reasons` say
    what it saw; a test may set `fault`.
    """

    name = "scripted"

    def __init__(
        self,
        scripts: Mapping[str, Script | Plan],
        *,
        model: str = "scripted",
        context_length: int = 2048,
        max_seats: int = 4,
        prefix_page_tokens: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model, self.context_length = model, context_length
        self.tokenizer = byte_tokenizer()
        self.submitted: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.boundaries: list[tuple[int, ...]] = []
        self.finish_reasons: dict[int, str] = {}
        self.fault: str | None = None
        self._scripts, self._max_seats, self._sleep = dict(scripts), max_seats, sleep
        self._prefix_page_tokens = prefix_page_tokens
        self._requests: list[_Running] = []
        self._ended: list[tuple[int, int, int, AcceptanceStats]] = []  # prompt, cached, output tokens; acceptance
        self._changed = threading.Condition()
        self._state = "new"  # then "open", "draining", "stopped"
        self._thread = threading.Thread(target=self._loop, name="scripted-backend", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._state = "open"
        self._thread.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Take no more requests, let running ones end for `drain_s` seconds, abort the rest. May be called again."""
        with self._changed:
            if self._state in ("new", "stopped"):
                return
            self._state = "draining"
            self._changed.wait_for(lambda: not self._requests, timeout=drain_s)
            self._state = "stopped"
            self._changed.notify_all()
        self._thread.join()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_chunk: Callable[[Chunk], None],
        *,
        boundaries: Sequence[int] = (),
    ) -> int:
        """Queue a request; raises what its script says, or RequestError where prompt and answer cannot fit."""
        prompt = tuple(prompt_token_ids)
        found = self._find(prompt)
        if isinstance(found, Script) and found.refusal is not None:
            raise found.refusal
        if not prompt or len(prompt) >= self.context_length:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens; give between 1 and {self.context_length - 1}, "
                f"since the context length is {self.context_length}."
            )
        with self._changed:
            if self._state != "open":
                raise RequestError("The backend does not run; start it first.")
            index = len(self.submitted)
            script = found if isinstance(found, Script) else found.script(index, params)
            if self._prefix_page_tokens:
                script = replace(script, num_cached_tokens=self._num_known(prompt))
            self.submitted.append((prompt, params))
            self.boundaries.append(tuple(boundaries))
            decoder = IncrementalDecoder(self.tokenizer, shown_ids=params.shown_token_ids)
            self._requests.append(_Running(index, prompt, params, script, on_chunk, decoder))
            self._changed.notify_all()
        return index

    def cancel(self, request_index: int) -> None:
        """End a request with finish reason "abort" before its next step; nothing happens if it has ended."""
        with self._changed:
            for request in self._requests:
                if request.index == request_index:
                    request.is_cancelled = True
            self._changed.notify_all()

    def speculation(self) -> Speculation:
        """Active once a step had drafts."""
        acceptance = self.gauges().acceptance
        is_active = acceptance.num_draft_tokens > 0
        longest = max((script.num_speculative_tokens for script in self._scripts.values()), default=0)
        return Speculation(is_active, "script", longest, None if is_active else "nothing was drafted yet")

    def gauges(self) -> Gauges:
        """Counts of all requests; pages are counted as if each held 16 tokens."""
        with self._changed:
            running, waiting = self._requests[: self._max_seats], self._requests[self._max_seats :]
            live = [(len(each.prompt_token_ids), 0, each.num_output_tokens, each.acceptance) for each in running]
            rows = [*self._ended, *live]
            num_pages = self._max_seats * -(-self.context_length // _PAGE_TOKENS)
            used = sum(-(-(num_prompt + num_output) // _PAGE_TOKENS) for num_prompt, _, num_output, _ in live)
            return Gauges(
                num_running=len(running),
                num_waiting=len(waiting),
                num_free_pages=num_pages - used,
                num_pages=num_pages,
                num_preemptions=0,
                num_prompt_tokens=sum(row[0] for row in rows),
                num_cached_tokens=sum(row[1] for row in rows),
                num_output_tokens=sum(row[2] for row in rows),
                acceptance=pool(row[3] for row in rows),
            )

    def _num_known(self, prompt: Sequence[int]) -> int:
        """Tokens of whole pages with which an earlier prompt began too; the last token is always computed."""
        longest = max((_num_shared(prompt, earlier) for earlier, _ in self.submitted), default=0)
        return min(longest, len(prompt) - 1) // self._prefix_page_tokens * self._prefix_page_tokens

    def _find(self, prompt: Sequence[int]) -> Script | Plan:
        text = self.tokenizer.decode(prompt)
        for key, script in self._scripts.items():
            if key in text:
                return script
        raise RequestError(f"No script has a key that is in the prompt {text[:80]!r}.")

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._state == "stopped")
                running = self._requests[: self._max_seats]
                if self._state == "stopped":
                    running = list(self._requests)
                    for request in running:
                        request.is_cancelled = True
                if not running:
                    return
            for request in running:
                self._advance(request)

    def _advance(self, request: _Running) -> None:
        """One step of one request: its chunk is counted before it is delivered."""
        script = request.script
        step = script.steps[request.num_steps % len(script.steps)] if script.steps else Step(())
        if step.delay_s and not request.is_cancelled:
            self._sleep(step.delay_s)
        with self._changed:
            chunk = self._cancelled(request) if request.is_cancelled else self._next(request, step)
            if chunk.finish_reason is not None:
                self._requests.remove(request)
                self.finish_reasons[request.index] = chunk.finish_reason
                counts = (len(request.prompt_token_ids), script.num_cached_tokens, request.num_output_tokens)
                self._ended.append((*counts, request.acceptance))
                self._changed.notify_all()
        request.on_chunk(chunk)

    def _cancelled(self, request: _Running) -> Chunk:
        return Chunk(request.index, "", (), 0, "abort", summary=self._summary(request))

    def _next(self, request: _Running, step: Step) -> Chunk:
        script, params = request.script, request.params
        token_ids = step.token_ids
        request.num_steps += 1
        finish_reason = None
        if not script.repeats and request.num_steps >= len(script.steps):
            finish_reason = "error" if script.error is not None else script.finish_reason
        left = min(params.max_tokens or self.context_length, self.context_length - len(request.prompt_token_ids))
        left -= request.num_output_tokens
        if len(token_ids) > left or (len(token_ids) == left and finish_reason is None):
            token_ids, finish_reason = token_ids[:left], "length"
        request.num_output_tokens += len(token_ids)
        ends_turn = finish_reason == "stop" and token_ids[-1:] and token_ids[-1] in self.tokenizer.eos_ids
        text = request.decoder.push(token_ids[:-1] if ends_turn else token_ids)
        if finish_reason is not None:
            text += request.decoder.flush()
        drafts = params.num_speculative_tokens != 0 and step.num_draft_tokens > 0
        num_accepted = min(step.num_accepted_draft_tokens, len(token_ids)) if drafts else 0
        num_drafted = step.num_draft_tokens if drafts else 0
        if num_drafted:
            request.acceptance.record_cycle(draft_length=num_drafted, num_accepted_tokens=num_accepted)
        summary = None if finish_reason is None else self._summary(request, finish_reason == "error")
        logprobs = () if params.logprobs is None else tuple(_logprobs(i, params.logprobs) for i in token_ids)
        return Chunk(request.index, text, token_ids, num_accepted, finish_reason, num_drafted, logprobs, summary)

    def _summary(self, request: _Running, has_failed: bool = False) -> RequestSummary:
        return RequestSummary(
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.script.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            acceptance=request.acceptance,
            error=request.script.error if has_failed else None,
        )


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Made up, but in order: −0.5 for the token, −1, −2, … for a, b, c, …"""
    top = tuple((other, -1.0 - rank) for rank, other in enumerate(_TOP_LOGPROBS[:num_top]))
    return TokenLogprobs(token_id, -0.5, top)
