"""Captured graphs as they are replayed, watched from outside: how long the device waits for the host in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outrider.backends.floor import timing_event


@contextmanager
def watched_replays(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Inside, every replay of a CUDA graph in this process calls `before` and `after` around itself."""
    original = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        before()
        original(graph)
        after()

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]


class ReplayGaps:
    """Time on the device from the end of each replay to the beginning of the next."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note replays inside; leave with the device idle."""

        def before() -> None:
            self._events.append((self._recorded(), None))

        def after() -> None:
            self._events[-1] = (self._events[-1][0], self._recorded())

        with watched_replays(before, after):
            yield
        if self._events:
            torch.cuda.synchronize()

    def _recorded(self) -> Any:
        event = timing_event()
        event.record()
        return event

    def gaps_us(self) -> list[float]:
        """Microseconds, in order; one less than there were replays."""
        pairs = zip(self._events, self._events[1:], strict=False)
        return [1e3 * earlier[1].elapsed_time(later[0]) for earlier, later in pairs]
