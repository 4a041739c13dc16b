"""What a backend is to those who measure or serve it: something that streams answers to prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.core import AcceptanceStats, Chunk, Prompt, SamplingParams
from outrider.tokenizer import Tokenizer


class Backend(Protocol):
    """Anything that writes text: our engine here, an HTTP server elsewhere."""

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as the backend reads it."""
        ...

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Yield what each cycle adds; the first chunk holds the first token."""
        ...


@dataclass(frozen=True)
class Speculation:
    """Whether a backend drafts, and why not."""

    is_active: bool
    """True once a token was drafted and verified."""
    drafter: str | None
    num_speculative_tokens: int
    reason: str | None = None
    """Why it does not draft; None while it does."""
    details: dict[str, Any] = field(default_factory=dict)
    """Layout, revision, cost table: what the backend knows beside."""


@dataclass(frozen=True)
class Gauges:
    """How a backend stands at one moment. Counts since its start, except where a name says otherwise."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    acceptance: AcceptanceStats
    """Of all requests together, those that still run included."""


class ServingBackend(Protocol):
    """What a server fronts: many requests at a time, each answered through a callback.

    `submit` and `cancel` may be called from any thread at any time between `start` and `stop`; `on_chunk` is called
    from the backend's own thread, must not block, and gets exactly one chunk with a finish reason, the last.
    """

    name: str
    """Of the kind of backend: "local", "scripted"."""
    model: str
    """Of the target, as clients name it."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        ...

    @property
    def fault(self) -> str | None:
        """What broke the backend for good; None while it is healthy."""
        ...

    def start(self) -> None:
        """Begin to work; a failure to boot is raised here, naming the setting."""
        ...

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Take no more requests, finish running ones for at most `drain_s` seconds, abort the rest, end the thread."""
        ...

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_chunk: Callable[[Chunk], None],
        *,
        boundaries: Sequence[int] = (),
    ) -> int:
        """Queue a request, return its index. RequestError if it can never run, OverloadedError if the queue is full.

        `boundaries` are numbers of prompt tokens (ends of turns) at which later prompts may go on differently.
        """
        ...

    def cancel(self, request_index: int) -> None:
        """End a request wherever it is with finish reason "abort"; nothing happens if it has ended."""
        ...

    def speculation(self) -> Speculation:
        """Whether it drafts now."""
        ...

    def gauges(self) -> Gauges:
        """A snapshot for /metrics."""
        ...
