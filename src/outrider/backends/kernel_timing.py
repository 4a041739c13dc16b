"""Time single kernels at a target's shapes: products by name and attention, our set and torch's side by side.

Weights and caches are several copies, more than a cache holds, so that each call reads from memory. On CUDA a graph of
all of them is replayed, so that launching costs nothing; on a CPU the host's clock is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider import environment
from outrider.backends.dummy import build_dummy
from outrider.backends.floor import floor_figures, read_bandwidth, seconds_of
from outrider.backends.local import resolve_device
from outrider.engine.cache_plan import PAGE_SIZE
from outrider.errors import ConfigError
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.ops import Kernels, select_kernels
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import causal_spans
from outrider.models.config import LayerSpec, TargetConfig
from outrider.weights.dummy import DummyWeights

DISTINCT_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}  # read between two uses of the same numbers
MAX_COPIES = 16
NUM_REPLAYS = 5
ROWS = (1, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 4096, 32768)
ATTENTION_ROWS = (1, 8, 16)
KINDS = ("products", "attention")


@dataclass(frozen=True)
class Product:
    """One product of a target: the kernel that computes it, and its matrices [out, in]."""

    name: str
    kernel: str
    """"linear", "linears", "gated_linear" or "best"."""
    shapes: tuple[tuple[int, int], ...]

    @property
    def num_weights(self) -> int:
        """Numbers of all its matrices."""
        return sum(out_features * in_features for out_features, in_features in self.shapes)

    def call(self, kernels: Kernels, inputs: Tensor, weights: Sequence[Any], activation: str) -> list[Tensor]:
        """Run it on a set's own packed weights."""
        if self.kernel == "linears":
            return kernels.linears(inputs, weights)
        if self.kernel == "gated_linear":
            return [kernels.gated_linear(inputs, *weights, activation=activation)]
        if self.kernel == "best":
            return [kernels.best(inputs, weights[0])[0]]
        return [kernels.linear(inputs, weights[0])]


def products_of(config: TargetConfig) -> list[Product]:
    """The products of a pass, one of each kind of layer, as the models call them; experts are left out."""
    size, found = config.hidden_size, []
    for spec in _kinds_of_layer(config):
        kind = spec.kind.value.removesuffix("_attention")
        q_size, kv_size = config.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        kv_shapes = ((kv_size, size),) * (1 if spec.values_are_keys else 2)
        found.append(Product(f"qkv {kind}", "linears", ((q_size, size), *kv_shapes)))
        found.append(Product(f"output {kind}", "linear", ((size, q_size),)))
    inner = config.intermediate_size
    return [
        *found,
        Product("gate and up", "gated_linear", ((inner, size), (inner, size))),
        Product("down", "linear", ((size, inner),)),
        Product("head, best", "best", ((config.vocab_size, size),)),
    ]


def _kinds_of_layer(config: TargetConfig) -> list[LayerSpec]:
    """The first layer of each kind that has keys of its own."""
    found: dict[Any, LayerSpec] = {}
    for spec in config.layers:
        if spec.cache_source is None:
            found.setdefault(spec.kind, spec)
    return list(found.values())


def num_kernel_steps(kinds: Sequence[str]) -> int:
    """At most how often `time_kernels` reports progress: every product, every kind of attention, and the bandwidth."""
    return 1 + ("products" in kinds) * 7 + ("attention" in kinds) * 2


def time_kernels(
    target: str,
    *,
    kinds: Sequence[str] = KINDS,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    kernels: str = "auto",
    device: str = "auto",
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """A row a product or attention, number of rows and kernel set. ConfigError for kinds or targets not known."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"--kernel {unknown[0]!r} is not known; choose from {', '.join(KINDS)}.")
    place = resolve_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    config = _config_of(target, dtype)
    sets = [select_kernels(kernels, dtype=dtype, device=place)]
    if sets[0].name != TorchKernels.name:
        sets.append(TorchKernels(dtype, place))
    progress("bandwidth")
    bench = _Bench(config, sets, dtype, place, read_bandwidth(place))
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for product in products_of(config) if "products" in kinds else ():
            progress(product.name)
            found += bench.time_product(product, rows)
        for spec in _kinds_of_layer(config) if "attention" in kinds else ():
            progress(f"attention, {spec.kind.value}")
            for context in sorted({min(max(each, *ATTENTION_ROWS), config.max_positions) for each in contexts}):
                found += bench.time_attention(spec, context)
    return {
        "target": target,
        "read_tb_per_s": bench.bandwidth / 1e12,
        "rows": found,
        "environment": environment.describe(),
    }


def _config_of(target: str, dtype: torch.dtype) -> TargetConfig:
    meta = torch.device("meta")
    kernels = TorchKernels(dtype, meta)
    built = build_dummy(target, kernels=kernels, dtype=dtype, device=meta, context_length=2, with_drafter=False)
    return built.target.config


@dataclass(frozen=True)
class _Bench:
    """What all measurements of one call share."""

    config: TargetConfig
    sets: Sequence[Kernels]
    dtype: torch.dtype
    device: torch.device
    bandwidth: float  # bytes a second

    def time_product(self, product: Product, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Every number of rows on every set, checked against float32."""
        num_bytes, activation = product.num_weights * self.dtype.itemsize, self.config.activation
        noise = DummyWeights("bench", dtype=self.dtype, device=self.device)
        stored = [
            [noise.claim(f"{product.name}/{copy}/{index}", shape) for index, shape in enumerate(product.shapes)]
            for copy in range(self._num_copies(num_bytes))
        ]
        inputs = torch.randn(max(rows), product.shapes[0][1], dtype=self.dtype, device=self.device)
        wide = [self._exact.pack(weight) for weight in stored[0]]
        expected = product.call(self._exact, inputs.float(), wide, activation)
        del wide
        for kernels in self.sets:
            packed = [[kernels.pack(weight) for weight in copy] for copy in stored]
            alone = product.call(kernels, inputs[:1], packed[0], activation)
            for num_rows in rows:
                calls = [partial(product.call, kernels, inputs[:num_rows], copy, activation) for copy in packed]
                outputs = calls[0]()
                yield {
                    "name": product.name,
                    "rows": num_rows,
                    "context": None,
                    "kernels": kernels.name,
                    "error": max(map(relative_error, outputs, (each[:num_rows] for each in expected))),
                    "same_as_alone": all(torch.equal(a[:1], b) for a, b in zip(outputs, alone, strict=True)),
                    **self._figures(calls, num_bytes),
                }

    def time_attention(self, spec: LayerSpec, context: int) -> Iterator[dict[str, Any]]:
        """Every number of rows on every set: the last rows of one request, windows as they are."""
        visible = min(context, spec.window or context)
        num_bytes = 2 * visible * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize
        caches = [self._cache(spec, context) for _ in range(self._num_copies(num_bytes))]
        wide = LayerCache(caches[0].keys.float(), caches[0].values.float(), caches[0].table)
        shape = (max(ATTENTION_ROWS), self.config.num_heads, spec.head_dim)
        queries = torch.randn(shape, dtype=self.dtype, device=self.device)
        positions = torch.arange(context - len(queries), context, device=self.device)
        spans = causal_spans(torch.zeros_like(positions), positions, spec.window)
        scale = self.config.attention_scale
        expected = self._exact.attention(queries.float(), wide, spans, scale=scale)
        for kernels in self.sets:
            alone = kernels.attention(queries[-1:], caches[0], spans[-1:], scale=scale)
            for num_rows in ATTENTION_ROWS:
                rows = queries[-num_rows:], spans[-num_rows:]
                calls = [partial(kernels.attention, rows[0], cache, rows[1], scale=scale) for cache in caches]
                output = calls[0]()
                yield {
                    "name": f"attention {spec.kind.value.removesuffix('_attention')}",
                    "rows": num_rows,
                    "context": context,
                    "kernels": kernels.name,
                    "error": relative_error(output, expected[-num_rows:]),
                    "same_as_alone": torch.equal(output[-1:], alone),
                    **self._figures(calls, num_bytes),
                }

    @property
    def _exact(self) -> Kernels:
        return TorchKernels(torch.float32, self.device)

    def _cache(self, spec: LayerSpec, context: int) -> LayerCache:
        """One seat's pages in random order: all positions, or what a window and the rows of a pass need."""
        num_pages = -(-context // PAGE_SIZE)
        if spec.window is not None:
            num_pages = min(num_pages, -(-(spec.window + max(ATTENTION_ROWS)) // PAGE_SIZE) + 1)
        shape = (num_pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        keys, values = (torch.randn(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return LayerCache(keys, values, torch.randperm(num_pages, dtype=torch.int32, device=self.device)[None])

    def _num_copies(self, num_bytes: int) -> int:
        return min(MAX_COPIES, -(-DISTINCT_BYTES[self.device.type] // num_bytes))

    def _figures(self, calls: Sequence[Callable[[], object]], num_bytes: int) -> dict[str, float | None]:
        ms = 1e3 * seconds_per_call(calls, self.device)
        return {"us": 1e3 * ms, **floor_figures(ms, num_bytes, self.bandwidth)}


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Mean of all calls in the fastest of NUM_REPLAYS rounds; on CUDA a round is one replay of a captured graph."""

    def run_all() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return min(seconds_of(run_all, device) for _ in range(NUM_REPLAYS)) / len(calls)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_all()  # what compiles or tunes at first does so here
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    graph.replay()
    return min(seconds_of(graph.replay, device) for _ in range(NUM_REPLAYS)) / len(calls)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest number expected."""
    wide = expected.float()
    return float((found.float() - wide).abs().max() / wide.abs().max().clamp_min(1e-30))
