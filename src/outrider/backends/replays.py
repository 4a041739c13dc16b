"""Captured graphs as they are replayed, watched from outside: how long the device waits for the host in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from outrider.backends.floor import timing_event


@contextmanager
def watched_replays(before: Callable[[torch.cuda.CUDAGraph], None], after: Callable[[], None]) -> Iterator[None]:
    """Inside, every replay of a CUDA graph in this process calls `before(graph)` and `after()` around itself."""
    original = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        before(graph)
        original(graph)
        after()

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]


class ReplayGaps:
    """Time on the device from the end of each replay to the beginning of the next, all of a cycle's together."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, Any]] = []
        self._ends: list[int] = []  # of cycles: replays so far

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note replays inside; leave with the device idle."""

        def before(_graph: torch.cuda.CUDAGraph) -> None:
            self._events.append((self._recorded(), None))

        def after() -> None:
            self._events[-1] = (self._events[-1][0], self._recorded())

        with watched_replays(before, after):
            yield
        if self._events:
            torch.cuda.synchronize()

    def end_cycle(self) -> None:
        """What is replayed from now on belongs to the next cycle, with the gap before it."""
        self._ends.append(len(self._events))

    def _recorded(self) -> Any:
        event = timing_event()
        event.record()
        return event

    def gaps_us(self) -> list[float]:
        """Microseconds of each cycle that replayed something, in order; the first of all replays has no gap."""
        pairs = zip(self._events, self._events[1:], strict=False)
        gaps = [0.0, *(1e3 * earlier[1].elapsed_time(later[0]) for earlier, later in pairs)]
        return [sum(gaps[first:end]) for first, end in pairwise([0, *self._ends]) if end > first]
