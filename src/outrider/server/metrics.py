"""/metrics: what the backend counts and what the server times, under vLLM's names so that its dashboards carry over.

The mapping from our identifiers to exported names is here and nowhere else. Every series has vLLM's labels `model_name`
and `engine` ("0").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.backends.base import Gauges
from outrider.core import Chunk

_LABELS = ("model_name", "engine")
_LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


class ServerMetrics:
    """One registry of one server. `gauges` is asked at each scrape; None while there is no backend yet."""

    def __init__(
        self,
        gauges: Callable[[], Gauges | None],
        *,
        model: str,
        prefix: str = "outrider",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(_BackendCollector(gauges, model, prefix))
        self._labels = (model, "0")

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"{prefix}:{name}", help_text, _LABELS, buckets=buckets, registry=self._registry)
            metric.labels(*self._labels)  # a series from the start, at 0
            return metric

        self._ttft = histogram("time_to_first_token_seconds", "Received to first token.", _LATENCY_BUCKETS)
        self._tpot = histogram("request_time_per_output_token_seconds", "(Latency − TTFT) ÷ (n − 1).", _TOKEN_BUCKETS)
        self._latency = histogram("e2e_request_latency_seconds", "Received to last token.", _LATENCY_BUCKETS)
        self._finished = Counter(
            f"{prefix}:request_success",  # vLLM's name, failures by their reason included
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )

    def watch(self) -> RequestTimer:
        """A timer for one request that has just been received."""
        return RequestTimer(self)

    def observe(self, *, ttft_s: float | None, latency_s: float, num_output_tokens: int, finish_reason: str) -> None:
        """Count one request that ended; times in seconds, TTFT None where no token came."""
        self._finished.labels(*self._labels, finish_reason).inc()
        self._latency.labels(*self._labels).observe(latency_s)
        if ttft_s is None:
            return
        self._ttft.labels(*self._labels).observe(ttft_s)
        if num_output_tokens > 1:
            self._tpot.labels(*self._labels).observe((latency_s - ttft_s) / (num_output_tokens - 1))

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self._registry)


class RequestTimer:
    """Times one answer from its chunks."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics, self._start_s = metrics, metrics.clock()
        self._ttft_s: float | None = None
        self._num_output_tokens = 0

    def push(self, chunk: Chunk) -> None:
        """Note a chunk as it comes; the last one is observed."""
        elapsed_s = self._metrics.clock() - self._start_s
        if chunk.token_ids and self._ttft_s is None:
            self._ttft_s = elapsed_s
        self._num_output_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._metrics.observe(
                ttft_s=self._ttft_s,
                latency_s=elapsed_s,
                num_output_tokens=self._num_output_tokens,
                finish_reason=chunk.finish_reason,
            )


class _BackendCollector(Collector):
    """Turns a snapshot of gauges into series."""

    def __init__(self, gauges: Callable[[], Gauges | None], model: str, prefix: str) -> None:
        self._gauges, self._model, self._prefix = gauges, model, prefix

    def collect(self) -> Iterator[Metric]:
        """All series of one snapshot."""
        now = self._gauges()
        if now is None:
            return
        used = 1.0 - now.num_free_pages / now.num_pages if now.num_pages else 0.0
        yield self._gauge("num_requests_running", "Requests that decode or prefill.", now.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a seat or pages.", now.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of pages in use, 0 to 1.", used)
        yield self._counter("num_preemptions", "Requests sent back to wait.", now.num_preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens.", now.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens emitted.", now.num_output_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", now.num_prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.num_cached_tokens)
        stats = now.acceptance
        yield self._counter("spec_decode_num_drafts", "Draft, verify, accept rounds.", stats.num_cycles)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.num_accepted_tokens)
        yield self._accepted_by_position(stats.accepted_histogram)

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", help_text, labels=_LABELS)
        family.add_metric((self._model, "0"), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", help_text, labels=_LABELS)
        family.add_metric((self._model, "0"), value)
        return family

    def _accepted_by_position(self, histogram: dict[int, int]) -> Metric:
        """Rounds that accepted the draft token at a position: those that accepted more than so many."""
        family = CounterMetricFamily(
            f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            labels=(*_LABELS, "position"),
        )
        for position in range(max(histogram, default=0)):
            accepted = sum(num_cycles for num_accepted, num_cycles in histogram.items() if num_accepted > position)
            family.add_metric((self._model, "0", str(position)), accepted)
        return family
