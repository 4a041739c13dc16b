"""From the backend's thread into the event loop: the answers to one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from outrider.backends.base import ServingBackend
from outrider.core import Chunk, SamplingParams
from outrider.server.metrics import RequestTimer, ServerMetrics


@dataclass(frozen=True)
class Job:
    """One answer to ask a backend for; the fields are those of its `submit`."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    boundaries: Sequence[int] = ()


class Answers:
    """Chunks of several answers in the order they come, each with its answer's position among the jobs.

    Whoever opens one cancels it in the end, come what may: what has ended is left alone, all else is aborted.
    """

    def __init__(self, backend: ServingBackend, metrics: ServerMetrics) -> None:
        self._backend, self._metrics = backend, metrics
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, Chunk]] = asyncio.Queue()
        self._open: dict[int, int] = {}  # request index by position
        self._timers: list[RequestTimer] = []
        self._is_cancelled = False

    async def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs or none; raises what the backend raises."""
        self._timers = [self._metrics.watch() for _ in jobs]
        try:
            await asyncio.to_thread(self._submit_all, jobs)
        except BaseException:
            self.cancel()
            raise

    def _submit_all(self, jobs: Sequence[Job]) -> None:
        for position, job in enumerate(jobs):
            on_chunk = partial(self._deliver, position)
            index = self._backend.submit(job.prompt_token_ids, job.params, on_chunk, boundaries=job.boundaries)
            self._open[position] = index
            if self._is_cancelled:  # the client left while this thread was submitting
                self.cancel()
                return

    def _deliver(self, position: int, chunk: Chunk) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (position, chunk))

    async def chunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Every chunk, until the last answer has ended."""
        num_open = len(self._timers)
        while num_open:
            position, chunk = await self._arrived.get()
            self._timers[position].push(chunk)
            if chunk.finish_reason is not None:
                num_open -= 1
                self._open.pop(position, None)
            yield position, chunk

    def cancel(self) -> None:
        """Abort every answer that has not ended."""
        self._is_cancelled = True
        for position, index in list(self._open.items()):
            del self._open[position]
            self._backend.cancel(index)
            self._timers[position].push(Chunk(index, "", (), 0, "abort"))
