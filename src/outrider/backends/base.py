"""What a backend is to those who measure or serve it: something that streams an answer to a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from outrider.core import Chunk, Prompt, SamplingParams


class Backend(Protocol):
    """Anything that writes text: our engine here, an HTTP server elsewhere."""

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as the backend reads it."""
        ...

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Yield what each cycle adds; the first chunk holds the first token."""
        ...
