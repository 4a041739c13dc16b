"""`bench run`: send a set of requests under a load, closed loop or open loop, and keep all that was seen.

Closed loop: so many requests are in flight at a time. Open loop: requests come at random (Poisson) at a rate, whether
or not earlier ones are done. Warm-up requests have prompts of their own and leave nothing in any figure.
"""

from __future__ import annotations

import base64
import hashlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any, Protocol

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest, ServerKind
from outrider.benchmarking.counters import CounterReset, Counters, read_counters
from outrider.benchmarking.request_sets import Item, RequestSet
from outrider.errors import ConfigError
from outrider.metrics import percentile

MAX_IN_FLIGHT = 512  # threads of an open loop; beyond it requests are late, and the run says so
_SALT_CHARACTERS = 12
_IDLE_TIMEOUT_S = 5.0
_POLL_S = 0.02
_LAG_PERIOD_S = 0.005


class Asker(Protocol):
    """What a run asks: `client.ServerClient`, or anything like it."""

    def complete(self, request: ChatRequest) -> Sample:
        """The answer to one request."""
        ...

    def metrics_text(self) -> str:
        """The text of /metrics."""
        ...

    def server_kind(self) -> ServerKind:
        """Which server answers."""
        ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """How a set is asked."""

    num_requests: int = 32
    """Measured ones; the set's items in turn."""
    num_warmups: int | None = None
    """Before them, not counted; None is twice the concurrency and at least four."""
    concurrency: int = 1
    """Requests in flight of a closed loop."""
    request_rate: float | None = None
    """Requests a second of an open loop; None is a closed one."""
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    """Of salts and arrivals. None draws one, so that no two runs share prompts and find each other's cache."""
    is_salted: bool = True
    """Whether each prompt begins with characters of its own."""
    expected_cached_share: float = 0.0
    """Share of prompt tokens that the caller means to be cached, such as a system prompt's."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of every request's body."""

    def __post_init__(self) -> None:
        """ConfigError for a load that asks nothing."""
        for name, least in (("num_requests", 1), ("concurrency", 1), ("max_tokens", 1), ("num_warmups", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; give at least {least}.")
        if not 0 <= self.temperature < inf:
            raise ConfigError(f"temperature is {self.temperature}; give 0 for greedy or a number above.")
        if self.request_rate is not None and not 0 < self.request_rate < inf:
            raise ConfigError(f"request_rate is {self.request_rate}; give requests a second, above 0.")
        if not 0 <= self.expected_cached_share <= 1:
            raise ConfigError(f"expected_cached_share is {self.expected_cached_share}; give a share from 0 to 1.")

    @property
    def warmups(self) -> int:
        """How many requests go before those that count."""
        return max(4, 2 * self.concurrency) if self.num_warmups is None else self.num_warmups


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that was seen of one run."""

    load: Load
    seed: int
    server: ServerKind
    samples: tuple[Sample, ...]
    """Of the measured requests, in the order of sending them."""
    counted: Counters | None
    """What the server counted meanwhile; None where it counts nothing, or started anew."""
    counter_fault: str | None
    """Why its counters cannot be used."""
    was_busy: bool
    """Requests of others were running before the first of ours, or after the last."""
    client_lag_s: float
    """How late this process was when it wanted to run: the 99th percentile over the run."""
    arrival_lag_s: float | None
    """How late requests of an open loop were sent, the 99th percentile."""
    was_stopped: bool = False
    """Whether it ended before all requests were answered; then nothing is known of the server's counters."""

    @property
    def duration_s(self) -> float:
        """First request sent to last chunk received."""
        ends = [sample.started_s + sample.e2e_s for sample in self.samples]
        return max(ends) - min(sample.started_s for sample in self.samples)


def run_load(
    asker: Asker,
    request_set: RequestSet,
    load: Load,
    *,
    progress: Callable[[], None] = lambda: None,
    keep: Callable[[Run], object] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Warm up, wait until the server is idle, measure. `progress` is called after each request, warm-ups included.

    Where it is stopped, `keep` gets what was answered until then; requests in flight are not waited for.

    EngineFault where the server cannot be reached; what fails later is in the samples.
    """
    seed = secrets.randbits(32) if load.seed is None else load.seed
    warmups = _requests(request_set.items, load, load.warmups, f"warm-up {seed}")
    measured = _requests(request_set.items, load, load.num_requests, f"measured {seed}")
    kind = asker.server_kind()
    if warmups:
        _ask_closed(asker, warmups, load.concurrency, {}, progress)
    before, is_idle_before = _idle_counters(asker, kind)
    samples: dict[int, Sample] = {}
    arrival_lags: list[float] = []
    with _client_lags(clock) as lags:
        try:
            if load.request_rate is None:
                _ask_closed(asker, measured, load.concurrency, samples, progress)
            else:
                arrival_lags = _ask_open(asker, measured, load.request_rate, seed, samples, progress, clock)
        except BaseException:
            answered = tuple(sample for _, sample in sorted(samples.copy().items()))
            if answered:
                keep(_stopped_run(load, seed, kind, answered, lags))
            raise
    after, is_idle_after = _idle_counters(asker, kind)
    counted, fault = _difference(after, before)
    return Run(
        load=load,
        seed=seed,
        server=kind,
        samples=tuple(samples[place] for place in range(len(measured))),
        counted=counted,
        counter_fault=fault,
        was_busy=not (is_idle_before and is_idle_after),
        client_lag_s=percentile(lags, 0.99) or 0.0,
        arrival_lag_s=percentile(arrival_lags, 0.99),
    )


def _stopped_run(load: Load, seed: int, kind: ServerKind, samples: tuple[Sample, ...], lags: Sequence[float]) -> Run:
    return Run(
        load=load,
        seed=seed,
        server=kind,
        samples=samples,
        counted=None,
        counter_fault=None,
        was_busy=False,
        client_lag_s=percentile(lags, 0.99) or 0.0,
        arrival_lag_s=None,
        was_stopped=True,
    )


def _requests(items: Sequence[Item], load: Load, num_requests: int, salt: str) -> list[ChatRequest]:
    chosen = [items[index % len(items)] for index in range(num_requests)]
    if load.is_salted:
        chosen = [item.salted(_salt(f"{salt} {index}")) for index, item in enumerate(chosen)]
    return [
        ChatRequest(
            messages=item.messages,
            prompt=item.prompt,
            tools=item.tools,
            max_tokens=item.max_tokens or load.max_tokens,
            temperature=load.temperature,
            extra=load.extra,
        )
        for item in chosen
    ]


def _salt(name: str) -> str:
    """Letters that differ from the first on: salts that counted up would share their beginnings."""
    return base64.b32encode(hashlib.sha256(name.encode()).digest())[:_SALT_CHARACTERS].decode()


def _ask_closed(
    asker: Asker,
    requests: Sequence[ChatRequest],
    concurrency: int,
    samples: dict[int, Sample],
    progress: Callable[[], None],
) -> None:
    """Put the answers into `samples` by their place, as they come."""

    def ask(place: int, request: ChatRequest) -> None:
        samples[place] = asker.complete(request)
        progress()

    with _threads(concurrency) as pool:
        for future in [pool.submit(ask, place, request) for place, request in enumerate(requests)]:
            future.result()


def _ask_open(
    asker: Asker,
    requests: Sequence[ChatRequest],
    request_rate: float,
    seed: int,
    samples: dict[int, Sample],
    progress: Callable[[], None],
    clock: Callable[[], float],
) -> list[float]:
    """Put the answers into `samples` by their place, as they come; returns how late each request was sent."""
    start_s = clock()
    arrivals_s = [start_s + offset for offset in poisson_arrivals(len(requests), request_rate, seed)]
    lags_s: list[float] = []

    def ask(place: int, request: ChatRequest, due_s: float) -> None:
        lags_s.append(clock() - due_s)
        samples[place] = asker.complete(request)
        progress()

    with _threads(min(len(requests), MAX_IN_FLIGHT)) as pool:
        futures = []
        for place, (request, due_s) in enumerate(zip(requests, arrivals_s, strict=True)):
            time.sleep(max(0.0, due_s - clock()))
            futures.append(pool.submit(ask, place, request, due_s))
        for future in futures:
            future.result()
    return lags_s


@contextmanager
def _threads(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose work is waited for, unless the run is stopped: an answer in flight may take minutes."""
    pool = ThreadPoolExecutor(num_threads)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def poisson_arrivals(num_requests: int, request_rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests come, the first at 0: exponential gaps of mean 1 ÷ rate."""
    draw = random.Random(f"arrivals {seed}")
    gaps = [0.0, *(draw.expovariate(request_rate) for _ in range(num_requests - 1))]
    return list(accumulate(gaps))


def _idle_counters(asker: Asker, kind: ServerKind) -> tuple[Counters, bool]:
    """A reading once nothing runs, and whether it came to that: servers count an answer after its last event."""
    end_s = time.monotonic() + _IDLE_TIMEOUT_S
    while True:
        found = read_counters(asker.metrics_text(), kind)
        if not found.num_requests_running or time.monotonic() > end_s:
            return found, not found.num_requests_running
        time.sleep(_POLL_S)


def _difference(after: Counters, before: Counters) -> tuple[Counters | None, str | None]:
    try:
        grown = after - before
    except CounterReset as reset:
        return None, str(reset)
    return (None if grown.num_generation_tokens is None else grown), None


@contextmanager
def _client_lags(clock: Callable[[], float]) -> Iterator[list[float]]:
    """How late a thread of this process wakes up, measured all along: whatever delays it delays our readings too."""
    lags: list[float] = []
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.is_set():
            due_s = clock() + _LAG_PERIOD_S
            time.sleep(_LAG_PERIOD_S)
            lags.append(max(0.0, clock() - due_s))

    thread = threading.Thread(target=watch, name="client-lag", daemon=True)
    thread.start()
    try:
        yield lags
    finally:
        stopped.set()
        thread.join()
