"""Backends that serve toy engines, and listeners that keep what they hear."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.backends.local import LLM
from outrider.backends.serving import LocalServing
from outrider.core import Chunk
from outrider.engine.engine import Engine

TIMEOUT_S = 30.0


class Listener:
    """An `on_chunk` that keeps its chunks; `wait` returns the last."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, chunk: Chunk) -> None:
        assert not self.ended.is_set(), "a chunk after the last"
        self.chunks.append(chunk)
        self.started.set()
        if chunk.finish_reason is not None:
            self.ended.set()

    def wait(self) -> Chunk:
        """The chunk with the finish reason."""
        assert self.ended.wait(TIMEOUT_S), "no last chunk"
        return self.chunks[-1]

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]


@contextmanager
def serving(engine: Engine, *, is_started: bool = True) -> Iterator[LocalServing]:
    """A backend over an engine without a tokenizer; stopped at the end."""
    backend = LocalServing(LLM(engine, tokenizer=None), model="toy")  # type: ignore[arg-type]
    if is_started:
        backend.start()
    try:
        yield backend
    finally:
        backend.stop()
