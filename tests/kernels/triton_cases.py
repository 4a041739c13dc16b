"""What the compile test compiles: every wrapper at the dimensions it is used with, on tensors without numbers."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.kernels import attention as paged
from outrider.kernels import matmul_low_bit, rows
from outrider.kernels.heads import HeadNorms, HeadRows
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.low_bit import LowBitMatrix
from outrider.kernels.matmul import Products
from outrider.kernels.matmul_sizes import Limits
from outrider.kernels.sampler import Drafted, RowFilters, Sampling
from outrider.kernels.sampling import GpuSampler
from outrider.kernels.walk import MarkovTensors, WalkStarts, WalkTensors
from outrider.kernels.walk_kernel import walk_in_one

NUM_ROWS, NUM_PAGES, PAGE_SIZE, TABLE_WIDTH, NUM_SEATS, EPS = 16, 512, 64, 128, 4, 1e-6
WIDE = 5376  # hidden size of the 31B target
LIMITS = {
    80: Limits(108, 163 << 10, is_hopper=False),
    86: Limits(82, 99 << 10, is_hopper=False),
    89: Limits(128, 99 << 10, is_hopper=False),
    90: Limits(132, 227 << 10, is_hopper=True),
    120: Limits(170, 99 << 10, is_hopper=False),
}
SHAPES = {"sliding": (32, 16, 256), "full": (32, 4, 512), "draft": (64, 8, 128), "small": (4, 1, 256)}  # H, G, D


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape: int) -> Tensor:
    """Norms and rotary tables."""
    return empty(*shape, dtype=torch.float32)


def ids(*shape: int) -> Tensor:
    """Seats, positions and tokens."""
    return empty(*shape, dtype=torch.int64)


def empty_cache(num_groups: int, head_size: int) -> LayerCache:
    """Pages of one layer."""
    pages = (empty(NUM_PAGES, PAGE_SIZE, num_groups, head_size) for _ in range(2))
    return LayerCache(*pages, empty(NUM_SEATS, TABLE_WIDTH, dtype=torch.int32))


def finish_heads(shape: str, **changes: Any) -> Callable[[], object]:
    """Queries, keys and values out of one wide product, to the cache."""
    num_heads, num_groups, size = SHAPES[shape]
    parts = (num_heads * size, num_groups * size, num_groups * size)
    projected = HeadRows(*empty(NUM_ROWS, sum(parts)).split(parts, dim=1))
    norms, table = HeadNorms(floats(size), floats(size), floats(size)), floats(4096, size // 2)
    options = {"cache": empty_cache(num_groups, size), "seats": ids(NUM_ROWS)} | changes
    return lambda: rows.finish_heads(projected, norms, table, table, ids(NUM_ROWS), eps=EPS, **options)


def finish_context(shape: str) -> Callable[[], object]:
    """Keys and values alone, to the cache."""
    _, num_groups, size = SHAPES[shape]
    keys, values = (empty(NUM_ROWS, num_groups * size) for _ in range(2))
    norms, table = HeadNorms(None, floats(size), None), floats(4096, size // 2)
    options = {"cache": empty_cache(num_groups, size), "seats": ids(NUM_ROWS)}
    return lambda: rows.finish_heads(
        HeadRows(None, keys, values), norms, table, table, ids(NUM_ROWS), eps=EPS, **options
    )


def attend(
    shape: str, architecture: int, *, num_rows: int = NUM_ROWS, num_fresh: int = 0, table_width: int = TABLE_WIDTH
) -> Callable[[], object]:
    """Attention as a GPU of that architecture tiles it."""
    num_heads, num_groups, size = SHAPES[shape]
    cache = empty_cache(num_groups, size)._replace(table=empty(NUM_SEATS, table_width, dtype=torch.int32))
    fresh = empty(num_fresh, num_groups, size) if num_fresh else None
    queries, spans = empty(num_rows, num_heads, size), empty(num_rows, 5, dtype=torch.int32)

    def call() -> object:
        with unittest.mock.patch.object(paged, "device_limits", return_value=LIMITS[architecture]):
            return paged.attention(queries, cache, spans, scale=1.0, fresh_k=fresh, fresh_v=fresh)

    return call


def low_bit(name: str, kind: str, num_rows: int, architecture: int) -> Callable[[], object]:
    """A product, or the head's, of int8 or int4 weights as a GPU of that architecture tiles it."""
    values = empty(WIDE, WIDE, dtype=torch.int8) if kind == "int8" else empty(WIDE, WIDE // 2, dtype=torch.uint8)
    scales = floats(WIDE, 1) if kind == "int8" else empty(WIDE, WIDE // 32)
    call = matmul_low_bit.low_bit_product if name == "product" else matmul_low_bit.low_bit_best

    def launch() -> object:
        with unittest.mock.patch.object(matmul_low_bit, "device_limits", return_value=LIMITS[architecture]):
            return call(empty(num_rows, WIDE), LowBitMatrix(values, scales))

    return launch


def sampling_of(num_rows: int) -> Sampling:
    """Of so many rows or requests."""
    wholes, fractions = (ids(num_rows) for _ in range(3)), (empty(num_rows, dtype=torch.float64) for _ in range(3))
    temperatures, top_ps, min_ps = fractions
    top_ks, seeds, are_seeded = wholes
    return Sampling(temperatures, top_ks, top_ps, min_ps, seeds, are_seeded)


def rejection(vocab_size: int, num_drafts: int, num_candidates: int) -> Callable[[], object]:
    """Verdicts on sampled drafts."""
    candidates = NUM_SEATS, num_drafts, num_candidates
    filters = RowFilters(floats(NUM_ROWS), floats(NUM_ROWS), empty(NUM_ROWS, dtype=torch.float64))
    drafted = Drafted(
        token_ids=ids(*candidates[:2]),
        candidate_ids=ids(*candidates),
        candidate_probs=floats(*candidates),
        chances=floats(*candidates[:2]),
        lengths=ids(NUM_SEATS),
        positions=ids(NUM_SEATS),
        row_index=ids(NUM_SEATS, num_drafts + 1),
    )
    return lambda: GpuSampler().reject(floats(NUM_ROWS, vocab_size), sampling_of(NUM_SEATS), filters, drafted)


def walk(kind: str | None, num_candidates: int = 256, *, sampling: Sampling | None = None) -> Callable[[], object]:
    """Seven slots of a drafter with heads, or of one that has none."""
    shape, rank, markov = (NUM_SEATS, 7), 256, None
    outs, ins = {"gated": (rank, rank), "rnn": (3 * rank, 2 * rank)}.get(kind or "", (0, 0))
    if kind is not None:
        joint, parts = (floats(outs, WIDE + ins)[:, WIDE:], floats(*shape, outs)) if outs else (None, None)
        rows = (empty(*shape, num_candidates, rank) for _ in range(2))
        markov = MarkovTensors(empty(NUM_SEATS, rank), *rows, joint, parts)
    candidates = floats(*shape, num_candidates), ids(*shape, num_candidates)
    tensors = WalkTensors(*candidates, markov, floats(rank) if kind else None, floats(*shape))
    return lambda: walk_in_one(tensors, WalkStarts(*(ids(NUM_SEATS) for _ in range(3))), sampling)


def walk_cases() -> dict[str, Callable[[], object]]:
    """Greedy and sampled; a reduced vocabulary may have few candidates."""
    kinds = (None, "vanilla", "gated", "rnn")
    return {
        **{f"walk {kind}": walk(kind) for kind in kinds},
        **{f"sampled walk {kind}": walk(kind, sampling=sampling_of(NUM_SEATS)) for kind in kinds},
        "walk of few": walk("vanilla", 48, sampling=sampling_of(NUM_SEATS)),
    }


def sampled_cases() -> dict[str, Callable[[], object]]:
    """What is done with the logits of sampled requests; with one of a thing, Triton compiles it in."""
    sampler, rows, requests = GpuSampler(), sampling_of(NUM_ROWS), sampling_of(NUM_SEATS)
    logits, few = floats(NUM_ROWS, 262_144), floats(NUM_ROWS, 512)
    filters = RowFilters(floats(NUM_ROWS), floats(NUM_ROWS), empty(NUM_ROWS, dtype=torch.float64))
    candidates = ids(NUM_SEATS, 256), floats(NUM_SEATS, 256), requests, ids(NUM_SEATS)
    return {
        "filters": lambda: sampler.filters(logits, rows),
        "filters of few": lambda: sampler.filters(few, rows),
        "choose": lambda: sampler.choose(logits, rows, filters, ids(NUM_ROWS)),
        "choose from few": lambda: sampler.choose(few, rows, filters, ids(NUM_ROWS)),
        "reject": rejection(262_144, 7, 256),
        "reject one": rejection(512, 1, 1),
        "reject none": rejection(512, 0, 1),
        **{f"draw {slot}": (lambda slot=slot: sampler.draw(*candidates, slot)) for slot in (0, 1, 3)},
    }


def products_of(architecture: int) -> Products:
    """As such a GPU cuts them up."""
    products = Products(torch.device("meta"))
    products.limits = LIMITS[architecture]
    return products


def product_cases(architecture: int) -> dict[str, Callable[[], object]]:
    """The products of one architecture, by name."""
    products, head = products_of(architecture), empty(262_144, WIDE)
    weight, narrow = empty(WIDE, WIDE), empty(640, 2048)

    def product(num_rows: int, **options: Any) -> Callable[[], object]:
        return lambda: products.product(empty(num_rows, WIDE), weight, **options)

    def gate(num_rows: int, *, is_silu: bool) -> Callable[[], object]:
        return lambda: products.gated_product(empty(num_rows, WIDE), weight, weight, is_silu=is_silu)

    return {
        **{f"product {rows}": product(rows) for rows in (16, 32, 64, 128, 256)},
        **{f"gate {rows}": gate(rows, is_silu=rows > 32) for rows in (16, 32, 64, 128)},
        "product and residual": product(16, residual=empty(16, WIDE)),
        "product in splits": lambda: products.product(empty(16, 2048), narrow),
        "logits": lambda: products.product(empty(16, WIDE), head, cap=30.0, dtype=torch.float32, splits=1),
        **{f"best {rows}": (lambda rows=rows: products.best(empty(rows, WIDE), head, cap=30.0)) for rows in (16, 256)},
    }


def cases_for(architecture: int) -> dict[str, Callable[[], object]]:
    """Every case by name, as a GPU of compute capability `architecture` / 10 launches it."""
    wide, norm = empty(NUM_ROWS, WIDE), floats(WIDE)
    table = empty(262_144, WIDE)
    return {
        "rms_norm": lambda: rows.rms_norm(wide, norm, eps=EPS),
        "rms_norm_add": lambda: rows.rms_norm_add(wide, norm, wide, eps=EPS),
        "rms_norm_add_norm": lambda: rows.rms_norm_add_norm(wide, norm, wide, norm, eps=EPS, scale=0.5),
        "gated gelu": lambda: rows.gated(wide, wide, activation="gelu_tanh"),
        "gated silu": lambda: rows.gated(wide, wide, activation="silu"),
        "embed": lambda: rows.embed(ids(NUM_ROWS), table, scale=2.0),
        **{f"finish_heads {shape}": finish_heads(shape) for shape in SHAPES},
        **{f"attention {shape}": attend(shape, architecture) for shape in SHAPES},
        "attention long": attend("full", architecture, table_width=2048),
        "attention of a prompt": attend("sliding", architecture, num_rows=1024),
        "attention fresh": attend("draft", architecture, num_fresh=16),
        **{
            f"{kind} {name} {num_rows}": low_bit(name, kind, num_rows, architecture)
            for kind in ("int8", "int4")
            for name, num_rows in (("product", 16), ("product", 128), ("best", 16))
        },
        "finish_heads of a context": finish_context("draft"),
        "finish_heads fresh": finish_heads("draft", cache=None, seats=None),
        **product_cases(architecture),
        **sampled_cases(),
        **walk_cases(),
    }
