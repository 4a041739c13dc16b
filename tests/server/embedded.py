"""The embedded default behind a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outrider.backends.serving import LocalServing
from tests.embedded import embedded_llm
from tests.serving import Served, serve_backend

MODEL = "embedded"


@contextmanager
def serve_embedded() -> Iterator[Served]:
    """Answers by the engine; until the server has ended nobody else may use `embedded_llm`."""
    with serve_backend(LocalServing(embedded_llm(), model=MODEL)) as served:
        yield served
