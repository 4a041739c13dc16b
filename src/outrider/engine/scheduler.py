"""Who runs: seats, the queue, and who gives way when the caches are full. No tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outrider.engine.cache_space import CacheSpace
from outrider.engine.state import RequestState


@dataclass
class Scheduler:
    """Requests in order of arrival: some run, at most one is prefilled, the others wait.

    Whoever runs is older than the one that is prefilled, and that one is older than all that wait.
    """

    num_seats: int
    space: CacheSpace
    waiting: deque[RequestState] = field(default_factory=deque)
    prefilling: RequestState | None = None
    running: list[RequestState] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def has_work(self) -> bool:
        """True while a request waits, is prefilled or runs."""
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def seated(self) -> list[RequestState]:
        """Requests that have a seat, oldest first."""
        return [*self.running, *([self.prefilling] if self.prefilling else [])]

    def next_to_prefill(self) -> RequestState | None:
        """The request whose prompt has begun, else the first that waits, if there is a seat and room for its text."""
        if self.prefilling is None and self.waiting and len(self.running) < self.num_seats:
            request = self.waiting[0]
            taken = {other.seat for other in self.running}
            seat = next(seat for seat in range(self.num_seats) if seat not in taken)
            found = self.space.admit(seat, request.prefill_token_ids, is_shareable=request.given is None)
            if found is not None:
                request.seat, request.num_computed_tokens = seat, found
                if request.num_preemptions == 0:  # later it finds what it left itself
                    request.num_cached_tokens = found
                self.prefilling = self.waiting.popleft()
        return self.prefilling

    def start(self, request: RequestState) -> None:
        """Let the request that was prefilled run."""
        self.prefilling = None
        self.running.append(request)

    def make_room(self, request: RequestState, *, num_committed: int, num_rows: int) -> bool:
        """Reserve the positions of a pass, taking seats from the youngest; False where that was the request itself."""
        while not self.space.reserve(request.seat, num_committed=num_committed, num_rows=num_rows):
            youngest = self.seated[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: RequestState) -> None:
        """Back to the head of the queue. It is prefilled again with its text so far, and then goes on as if never out.

        All that wait are younger, so order is kept.
        """
        self.remove(request)
        self.waiting.appendleft(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def remove(self, request: RequestState) -> None:
        """Take a request out wherever it is; its seat is free at once."""
        if request.seat >= 0:
            self.space.release(request.seat)
        request.seat, request.num_computed_tokens = -1, 0
        self.prefilling = None if self.prefilling is request else self.prefilling
        self.running = [other for other in self.running if other is not request]
        self.waiting = deque(other for other in self.waiting if other is not request)
