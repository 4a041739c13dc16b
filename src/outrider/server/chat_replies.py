"""From chunks to chat messages: one choice of /v1/chat/completions, and what its tokens were spent on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.core import Chunk, TokenLogprobs
from outrider.server.gemma4_template import CHANNEL, CHANNEL_END
from outrider.server.parser import ChatParser, ContentDelta, Delta, ReasoningDelta, ToolCallStart
from outrider.server.replies import Piece, Tally, spelled
from outrider.tokenizer import Tokenizer

_OPEN_THOUGHT = re.compile(re.escape(CHANNEL) + r"(thought\s*)?\Z")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class ThoughtCounter:
    """Counts tokens of thoughts by id, without markers and end: however a stream is cut, the count is the same."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, *, enable_thinking: bool) -> None:
        """`prompt` is the rendered chat, which may have opened a thought already."""
        self._open_id, self._close_id = tokenizer.id_of(CHANNEL), tokenizer.id_of(CHANNEL_END)
        self._end_ids = tokenizer.eos_ids
        closed_early = enable_thinking and prompt.endswith(CHANNEL_END)
        self._is_inside = _OPEN_THOUGHT.search(prompt) is not None or closed_early

    def count(self, token_ids: Iterable[int]) -> int:
        """How many of the next tokens are thought."""
        num_inside = 0
        for token_id in token_ids:
            if token_id in (self._open_id, self._close_id):
                self._is_inside = token_id == self._open_id
            elif token_id not in self._end_ids:
                num_inside += self._is_inside
        return num_inside


class ChatChoice:
    """One choice of /v1/chat/completions. Thoughts go by both of their names, `reasoning` and `reasoning_content`."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        tally: Tally,
        parser: ChatParser,
        thoughts: ThoughtCounter,
        *,
        wants_logprobs: bool,
        shows_all: bool = False,
        shows_ids: bool = False,
    ) -> None:
        """`shows_all` sends a piece for every chunk, one without text included; `shows_ids` see `spelled`."""
        self.tally = tally
        self._index, self._tokenizer, self._parser, self._thoughts = index, tokenizer, parser, thoughts
        self._wants_logprobs, self._shows_all, self._shows_ids = wants_logprobs, shows_all, shows_ids
        self._content, self._reasoning, self._finish_reason = "", "", ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def opening(self) -> list[Piece]:
        """The role."""
        return [self._piece({"role": "assistant", "content": ""})]

    def push(self, chunk: Chunk) -> list[Piece]:
        """One piece for each kind of delta in the chunk; logprobs with the first, the finish reason with the last."""
        self.tally.push(chunk)
        self.tally.num_reasoning_tokens += self._thoughts.count(chunk.token_ids)
        deltas, finish_reason = self._parser.push(chunk.text), None
        if chunk.finish_reason is not None:
            rest, finish_reason = self._parser.finish(chunk.finish_reason)
            deltas, self._finish_reason = [*deltas, *rest], finish_reason
        pieces = [self._piece(self._add(delta)) for delta in deltas]
        logprobs = [self._logprob_entry(entry) for entry in chunk.logprobs] if self._wants_logprobs else []
        self._logprobs += logprobs
        if not pieces and (logprobs or finish_reason or self._shows_all):
            pieces = [self._piece({})]
        if logprobs:
            pieces[0]["logprobs"] = {"content": logprobs, "refusal": None}
        if finish_reason:
            pieces[-1]["finish_reason"] = finish_reason
        return pieces

    def whole(self) -> Piece:
        """The choice with its message."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._content or (None if self._calls else ""),
            "reasoning": self._reasoning or None,
            "reasoning_content": self._reasoning or None,
        }
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = {"content": self._logprobs, "refusal": None} if self._wants_logprobs else None
        head = {"index": self._index, "message": message}
        return {**head, "logprobs": logprobs, "finish_reason": self._finish_reason}

    def _piece(self, delta: dict[str, Any]) -> Piece:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _add(self, delta: Delta) -> dict[str, Any]:
        """Take a delta into the message; its form in a stream."""
        if isinstance(delta, ContentDelta):
            self._content += delta.text
            return {"content": delta.text}
        if isinstance(delta, ReasoningDelta):
            self._reasoning += delta.text
            return {"reasoning": delta.text, "reasoning_content": delta.text}
        if isinstance(delta, ToolCallStart):
            call = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
            self._calls.append(call)
            return {"tool_calls": [{"index": delta.index, **call, "function": {"name": delta.name, "arguments": ""}}]}
        self._calls[delta.index]["function"]["arguments"] += delta.text
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}

    def _logprob_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.raw_logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        shown = spelled(token_id, self._tokenizer, as_id=self._shows_ids)
        return {"token": shown, "logprob": logprob, "bytes": _bytes_of(text, token_id in self._tokenizer.byte_ids)}


def _bytes_of(text: str, is_byte: bool) -> Sequence[int]:
    """UTF-8 of a token; a part of a character is shown by its spelling and stands for one byte."""
    part = _BYTE.fullmatch(text) if is_byte else None
    return [int(part.group(1), 16)] if part else list(text.encode("utf-8"))
