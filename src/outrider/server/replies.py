"""From chunks to OpenAI's objects. A whole answer is made of the very pieces that a stream would have sent."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.core import AcceptanceStats, Chunk, TokenLogprobs
from outrider.metrics import acceptance_rate, mean_acceptance_length
from outrider.server.faults import Fault
from outrider.tokenizer import Tokenizer

DONE = "data: [DONE]\n\n"
Piece = dict[str, Any]


class Choice(Protocol):
    """One answer as it grows."""

    tally: Tally

    def opening(self) -> list[Piece]:
        """Pieces of a stream before any token."""
        ...

    def push(self, chunk: Chunk) -> list[Piece]:
        """Pieces that a chunk adds to a stream, the last of all with the finish reason; none where nothing shows."""
        ...

    def whole(self) -> Piece:
        """The choice of an answer that is not streamed, after the last chunk."""
        ...


@dataclass
class Tally:
    """Tokens of one answer, all counted from what was delivered."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    synthetic: bool = False

    def push(self, chunk: Chunk) -> None:
        """Count a chunk."""
        self.num_output_tokens += len(chunk.token_ids)
        if chunk.summary is not None:
            self.num_cached_tokens = chunk.summary.num_cached_tokens
            self.acceptance, self.synthetic = chunk.summary.acceptance, chunk.summary.synthetic


def usage(tallies: Sequence[Tally], num_choices: int) -> dict[str, Any]:
    """OpenAI's usage: answers summed; each prompt once, though it has `num_choices` answers, next to each other."""
    prompts = tallies[::num_choices]
    num_prompt = sum(tally.num_prompt_tokens for tally in prompts)
    num_output = sum(tally.num_output_tokens for tally in tallies)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(tally.num_cached_tokens for tally in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(tally.num_reasoning_tokens for tally in tallies)},
    }


def acceptance_object(stats: AcceptanceStats, num_speculative_tokens: int) -> dict[str, Any] | None:
    """What drafting brought, in vLLM's field names; None where nothing was drafted."""
    if stats.num_draft_tokens == 0:
        return None
    longest = max(num_speculative_tokens, *stats.accepted_histogram)
    return {
        "mean_acceptance_length": mean_acceptance_length(stats),
        "draft_acceptance_rate": acceptance_rate(stats),
        "acceptance_histogram": [stats.accepted_histogram.get(count, 0) for count in range(longest + 1)],
        "num_spec_steps": stats.num_cycles,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": num_speculative_tokens,
    }


def check_chunk(chunk: Chunk) -> None:
    """Raise where the answer failed, so that a failure never looks like a short answer."""
    if chunk.finish_reason == "error":
        reason = chunk.summary.error if chunk.summary else None
        raise Fault(500, reason or "The engine failed at this request.", code="engine_error")
    if chunk.finish_reason == "abort":
        raise Fault(503, "The request was aborted: the server is shutting down.", code="aborted")


class CompletionChoice:
    """One choice of /v1/completions."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        tally: Tally,
        *,
        wants_logprobs: bool,
        shows_all: bool = False,
        shows_ids: bool = False,
    ) -> None:
        """`shows_all` sends a piece for every chunk, one without text included; `shows_ids` see `spelled`."""
        self.tally = tally
        self._index, self._tokenizer = index, tokenizer
        self._wants_logprobs, self._shows_all, self._shows_ids = wants_logprobs, shows_all, shows_ids
        self._text, self._finish_reason = "", ""
        self._logprobs: dict[str, list[Any]] = {}
        self._offset = 0

    def opening(self) -> list[Piece]:
        """Nothing comes before the text."""
        return []

    def push(self, chunk: Chunk) -> list[Piece]:
        """At most one piece a chunk."""
        self.tally.push(chunk)
        self._text += chunk.text
        self._finish_reason = chunk.finish_reason or ""
        logprobs = self._chunk_logprobs(chunk.logprobs) if self._wants_logprobs else None
        has_logprobs = logprobs is not None and len(logprobs["tokens"]) > 0
        if not (chunk.text or has_logprobs or chunk.finish_reason or self._shows_all):
            return []
        return [_text_piece(self._index, chunk.text, logprobs, chunk.finish_reason)]

    def whole(self) -> Piece:
        """The choice with its full text."""
        return _text_piece(
            self._index, self._text, self._logprobs if self._wants_logprobs else None, self._finish_reason
        )

    def _chunk_logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        added: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text = self._tokenizer.token_text(entry.token_id)
            shown = self._spelled(entry.token_id)
            top = {self._spelled(token_id): logprob for token_id, logprob in entry.top}
            added["tokens"].append(shown)
            added["token_logprobs"].append(entry.raw_logprob)
            added["top_logprobs"].append({**top, shown: entry.raw_logprob})
            added["text_offset"].append(self._offset)
            self._offset += len(text)
        for name, values in added.items():
            self._logprobs.setdefault(name, []).extend(values)
        return added

    def _spelled(self, token_id: int) -> str:
        return spelled(token_id, self._tokenizer, as_id=self._shows_ids)


def spelled(token_id: int, tokenizer: Tokenizer, *, as_id: bool) -> str:
    """A token among log-probabilities: its text, or `token_id:123` where the request wants that."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def _text_piece(index: int, text: str, logprobs: dict[str, list[Any]] | None, finish_reason: str | None) -> Piece:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class Envelope:
    """What all objects of one answer share: id, time, model; and the parts that a client may ask for."""

    def __init__(self, kind: str, model: str, choices: Sequence[Choice], num_choices: int, num_drafts: int) -> None:
        """`kind` is "text_completion" or "chat.completion"; `num_drafts` the draft length that was asked for."""
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        self._kind, self._choices, self._num_choices, self._num_drafts = kind, choices, num_choices, num_drafts
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def response(self) -> dict[str, Any]:
        """The whole answer."""
        body = {**self._head, "object": self._kind, "choices": [choice.whole() for choice in self._choices]}
        return {**body, "usage": self.usage(), **self._metrics()}

    def chunk(self, piece: Piece, **beside: Any) -> dict[str, Any]:
        """One event of a stream; statistics come with the finish reason."""
        body = {**self._chunk_head(), "choices": [piece], **beside}
        return {**body, **self._metrics()} if piece["finish_reason"] is not None else body

    def usage_chunk(self) -> dict[str, Any]:
        """The event after the last choice, if the client asked for usage."""
        return {**self._chunk_head(), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Of everything delivered so far."""
        return usage([choice.tally for choice in self._choices], self._num_choices)

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": self._kind + (".chunk" if self._kind == "chat.completion" else "")}

    def _metrics(self) -> dict[str, Any]:
        if len(self._choices) > 1:  # as vLLM: statistics of one answer only
            return {}
        tally = self._choices[0].tally
        stats = acceptance_object(tally.acceptance, self._num_drafts)
        if stats is not None and tally.synthetic:
            stats["synthetic"] = True
        return {"metrics": {"speculative_decoding": stats}}


def draft_marks(chunk: Chunk, tokenizer: Tokenizer) -> dict[str, Any]:
    """Which tokens of a chunk were drafted and accepted: the first `accepted` of `tokens`."""
    tokens = [tokenizer.token_text(token_id) for token_id in chunk.token_ids]
    return {"accepted": chunk.num_accepted_draft_tokens, "drafted": chunk.num_draft_tokens, "tokens": tokens}


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
