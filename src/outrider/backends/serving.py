"""Our engine behind a server: one thread runs it, any thread hands it requests."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider import metrics
from outrider.backends.base import Gauges, Speculation
from outrider.backends.local import LLM
from outrider.core import AcceptanceStats, Chunk, RequestSummary, SamplingParams
from outrider.engine.scheduler import Scheduler
from outrider.engine.state import RequestState
from outrider.errors import ConfigError, EngineFault, OverloadedError
from outrider.tokenizer import Tokenizer

RETRY_AFTER_S = 1.0  # before anything is known of how fast requests end

OnChunk = Callable[[Chunk], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Client:
    """A request and who hears of it."""

    request: RequestState
    on_chunk: OnChunk


class LocalServing:
    """A ServingBackend over an LLM's engine. From `start` to `stop` nobody else may use the LLM.

    A request is checked by whoever submits it, so that a refusal reaches them at once; the engine's thread takes it
    over between two steps and never holds the lock during one.
    """

    name = "local"

    def __init__(self, llm: LLM, *, model: str) -> None:
        self.llm, self.model = llm, model
        self._lock = threading.Condition()
        self._clients: dict[int, _Client] = {}  # of all open requests; only the engine's thread takes out
        self._arrived: list[RequestState] = []
        self._cancelled: list[int] = []
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None  # seconds on the monotonic clock, once it is to stop
        self._fault: str | None = None
        self._tally = Tally()
        self._gauges = self._tally.gauges([], llm.engine.scheduler)

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.llm.engine.config.context_length

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self.llm.tokenizer

    @property
    def fault(self) -> str | None:
        """What broke the engine; None while it is healthy. A broken engine takes no more requests."""
        return self._fault

    def start(self) -> None:
        """Start the engine's thread."""
        if self._thread is not None:
            raise ConfigError("this backend was started before. Make a new one.")
        self._thread = threading.Thread(target=self._serve, name="outrider-engine", daemon=True)
        self._thread.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Take no more requests, let those that are open end within `drain_s` seconds, abort the rest."""
        with self._lock:
            self._deadline = time.monotonic() + drain_s
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_chunk: OnChunk,
        *,
        boundaries: Sequence[int] = (),
    ) -> int:
        """Queue a request, return its index.

        RequestError if it can never run, OverloadedError if the queue is full or closing, EngineFault after a fault.
        """
        with self._lock:
            self._check_open()
            request = self.llm.engine.make_request(prompt_token_ids, params, boundaries=boundaries)
            self._clients[request.index] = _Client(request, on_chunk)
            self._arrived.append(request)
            self._lock.notify()
        return request.index

    def _check_open(self) -> None:
        config = self.llm.engine.config
        if self._fault is not None:
            raise EngineFault(f"the engine has failed and takes no more requests: {self._fault}. Restart it.")
        if self._thread is None or self._deadline is not None:
            raise OverloadedError("The engine is not running or about to stop.", retry_after_s=RETRY_AFTER_S)
        if len(self._clients) >= config.max_seats + config.max_waiting:
            raise OverloadedError(
                f"{len(self._clients)} requests are open, as many as max_seats={config.max_seats} and "
                f"max_waiting={config.max_waiting} allow. Try again later.",
                retry_after_s=self._tally.seconds_to_next_end(),
            )

    def cancel(self, request_index: int) -> None:
        """End a request with finish reason "abort" after the step that is under way."""
        with self._lock:
            self._cancelled.append(request_index)
            self._lock.notify()

    def speculation(self) -> Speculation:
        """Whether a draft was verified since the start, and what stands against it."""
        engine = self.llm.engine
        num_tokens, is_proven = engine.default_draft_length, self._gauges.acceptance.num_draft_tokens > 0
        reasons = {
            engine.drafter_fault: engine.drafter_fault is not None,
            "no drafter is loaded": engine.proposer is None,
            "num_speculative_tokens is 0": num_tokens == 0,
            "no draft has been verified yet": not is_proven,
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        return Speculation(
            is_active=reason is None, drafter=self.llm.drafter_name, num_speculative_tokens=num_tokens, reason=reason
        )

    def gauges(self) -> Gauges:
        """As of the last step, and what has arrived since. A chunk is counted before anyone hears of it."""
        with self._lock:
            return replace(self._gauges, num_waiting=self._gauges.num_waiting + len(self._arrived))

    def _serve(self) -> None:
        """The engine's thread: hand over what arrived, run a step, pass on its chunks."""
        while self._take_in():
            try:
                chunks = self.llm.engine.step()
            except Exception as error:
                logger.exception("The engine failed; every open request fails with it.")
                self._fail_all(f"{type(error).__name__}: {error}")
            else:
                self._note_gauges()
                for chunk in chunks:
                    self._deliver(chunk)

    def _take_in(self) -> bool:
        """Wait until there is work; False once it is time to end the thread."""
        with self._lock:
            while not (self._clients or self._cancelled or self._deadline is not None):
                self._lock.wait()
            arrived, cancelled = list(self._arrived), list(self._cancelled)
            self._arrived.clear()
            self._cancelled.clear()
            deadline = self._deadline
        for request in arrived:
            self.llm.engine.queue(request)
        for index in cancelled if deadline is None or time.monotonic() < deadline else list(self._clients):
            self._abort(index)
        self._note_gauges()
        return deadline is None or bool(self._clients)

    def _abort(self, index: int) -> None:
        client = self._clients.get(index)
        if client is not None:
            self.llm.engine.abort(client.request)
            self._deliver(Chunk(index, "", (), 0, "abort"))

    def _fail_all(self, fault: str) -> None:
        with self._lock:
            self._fault = fault
            self._arrived.clear()
            clients = list(self._clients.values())
        for client in clients:
            self.llm.engine.abort(client.request)
            client.request.finish_reason, client.request.error = "error", fault
            self._deliver(Chunk(client.request.index, "", (), 0, "error"))

    def _deliver(self, chunk: Chunk) -> None:
        """Pass a chunk on, the last one with its summary. A callback that raises costs its own request only."""
        client = self._clients[chunk.request_index]
        if chunk.finish_reason is not None:
            with self._lock:
                del self._clients[chunk.request_index]
                self._tally.note_end(client.request)
            self._note_gauges()
            chunk = replace(chunk, summary=summary_of(client.request))
        try:
            client.on_chunk(chunk)
        except Exception:
            logger.exception("Request %d: whoever listened failed; the request is dropped.", chunk.request_index)
            self.cancel(chunk.request_index)

    def _note_gauges(self) -> None:
        scheduler = self.llm.engine.scheduler
        with self._lock:
            open_requests = [client.request for client in self._clients.values()]
            self._gauges = self._tally.gauges(open_requests, scheduler)


def summary_of(request: RequestState) -> RequestSummary:
    """What is known of a request that has ended."""
    return RequestSummary(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=len(request.output_token_ids),
        acceptance=request.acceptance,
        error=request.error,
        synthetic=request.is_synthetic,
    )


class Tally:
    """Counts of all requests since the start. A prompt counts from its first token of text on, so sums never fall."""

    def __init__(self) -> None:
        self._ended = _Sums()
        self._ends: deque[float] = deque(maxlen=16)  # seconds on the monotonic clock

    def note_end(self, request: RequestState) -> None:
        """Keep the counts of a request that has ended."""
        self._ended = self._ended.plus(request)
        self._ends.append(time.monotonic())

    def seconds_to_next_end(self) -> float:
        """Mean time between the last ends, at least RETRY_AFTER_S."""
        if len(self._ends) < 2:
            return RETRY_AFTER_S
        return max(RETRY_AFTER_S, (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1))

    def gauges(self, open_requests: Sequence[RequestState], scheduler: Scheduler) -> Gauges:
        """Ended and open requests together."""
        sums = self._ended
        for request in open_requests:
            sums = sums.plus(request)
        return Gauges(
            num_running=len(scheduler.seated),
            num_waiting=len(scheduler.waiting),
            num_free_pages=scheduler.space.num_free,
            num_pages=scheduler.space.num_pages,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=sums.num_prompt_tokens,
            num_cached_tokens=sums.num_cached_tokens,
            num_output_tokens=sums.num_output_tokens,
            acceptance=sums.acceptance,
        )


@dataclass(frozen=True)
class _Sums:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)

    def plus(self, request: RequestState) -> _Sums:
        if not request.output_token_ids:
            return self
        return _Sums(
            self.num_prompt_tokens + len(request.prompt_token_ids),
            self.num_cached_tokens + request.num_cached_tokens,
            self.num_output_tokens + len(request.output_token_ids),
            metrics.pool([self.acceptance, request.acceptance]),
        )
