"""Attention over pages joined to its twin; and a row's bits, alone and in any company.

Seen red: a chunk without its first position; the run's span in place of the row's; a ring that shows what it no longer
holds; missing pages read; a tile past its chunk; tiles that begin where a run does; parts without their largest score.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from outrider.kernels import attention as module
from outrider.kernels import attention_sizes
from outrider.kernels.attention import attention
from outrider.kernels.layer_cache import LayerCache
from tests.kernels.triton_mode import DEVICE, TWIN, assert_near, normal, row_by_row_products  # noqa: F401

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("row_by_row_products")]
NUM_SEATS, PAGE_SIZE = 3, 16
SMALL = (2, 1, 16)  # query heads, key/value heads, head size
TRUE_SIZES = {"sliding": (32, 16, 256), "full": (32, 4, 512), "draft": (64, 8, 128)}
Span = tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A cache of which every position is written, and queries by position, so that a row is the same everywhere."""

    cache: LayerCache
    queries: Tensor  # [positions, H, D]
    fresh: Tensor  # [2, F, G, D]

    @staticmethod
    def random(sizes: tuple[int, int, int], width: int, *, num_positions: int = 600) -> Layer:
        """Pages in random order, one of them and the rest of the pool full of NaN."""
        num_heads, num_groups, head_size = sizes
        num_pages = NUM_SEATS * width + 5
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))[: NUM_SEATS * width]
        pools = normal(2, num_pages, PAGE_SIZE, num_groups, head_size)
        unused = torch.ones(num_pages, dtype=torch.bool).scatter_(0, order, False)
        pools[:, unused.to(DEVICE)] = math.nan
        table = order.to(DEVICE, torch.int32).view(NUM_SEATS, width).contiguous()
        cache = LayerCache(pools[0], pools[1], table)
        queries, fresh = (
            normal(num_positions, num_heads, head_size, seed=2),
            normal(2, 9, num_groups, head_size, seed=3),
        )
        return Layer(cache, queries, fresh)

    def moved(self) -> Layer:
        """The same rows in other pages."""
        pages = torch.randperm(len(self.cache.keys), generator=torch.Generator().manual_seed(9)).to(DEVICE)
        table = pages.to(torch.int32)[self.cache.table.clamp_min(0).long()]
        table = torch.where(self.cache.table < 0, -1, table)
        pools = [torch.empty_like(pool).index_copy_(0, pages, pool) for pool in self.cache[:2]]
        return dataclasses.replace(self, cache=LayerCache(*pools, table))

    def attend(self, *spans: Span, with_fresh: bool = False) -> tuple[Tensor, Tensor]:
        """Ours and the twin's."""
        table = torch.tensor(spans, dtype=torch.int32, device=DEVICE)
        queries = self.queries[table[:, 2].long()]
        options = {"fresh_k": self.fresh[0], "fresh_v": self.fresh[1]} if with_fresh else {}
        kernels = (attention, TWIN.attention)
        ours, exact = (each(queries, self.cache, table, scale=0.3, **options) for each in kernels)
        return ours, exact

    def check(self, *spans: Span, with_fresh: bool = False) -> Tensor:
        """Near the twin, and each row the same bits alone, in other pages, and with the others in another order."""
        ours, exact = self.attend(*spans, with_fresh=with_fresh)
        assert_near(ours, exact)
        assert torch.equal(self.moved().attend(*spans, with_fresh=with_fresh)[0], ours)
        for row in {len(spans) // 2, len(spans) - 1}:
            assert torch.equal(self.attend(spans[row], with_fresh=with_fresh)[0][0], ours[row]), row
        mixed, _ = self.attend(*spans[::-1], with_fresh=with_fresh)
        assert torch.equal(mixed.flip(0), ours)
        return ours


def run(seat: int, first: int, count: int, window: int | None = None) -> list[Span]:
    """Successive rows of a target: each sees itself and the window before it."""
    return [
        (seat, 0 if window is None else max(0, position + 1 - window), position + 1, 0, 0)
        for position in range(first, first + count)
    ]


SPARE = (-1, 0, 0, 0, 0)


def test_decode_and_ragged_verify_rows_of_several_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that end at a seat, at a spare row, and at a border of rows; a chunk's border inside a run."""
    spans, layer = [*run(0, 127, 3), SPARE, *run(2, 0, 1), *run(1, 140, 2)], Layer.random(SMALL, width=10)
    ours = layer.check(*spans)
    assert not ours[3].any()
    monkeypatch.setattr(
        attention_sizes, "MOST_ROWS_WITH_PROGRAMS", 0
    )  # as a long prompt: a program takes run after run
    assert torch.equal(layer.attend(*spans)[0], ours)


def test_a_window_over_a_ring_that_has_wrapped() -> None:
    """A prefill chunk; NaN lies in what the window no longer shows."""
    layer = Layer.random(SMALL, width=4)
    for position in range(300 - 64, 291 - 40):  # older than what the first row sees
        page = layer.cache.table[1, position // PAGE_SIZE % 4]
        layer.cache.keys[page, position % PAGE_SIZE] = math.nan
        layer.cache.values[page, position % PAGE_SIZE] = math.nan
    layer.check(*run(1, 290, 10, window=40), (0, 100, 290, 0, 0))


def test_scores_beyond_what_their_powers_can_be() -> None:
    layer = Layer.random(SMALL, width=10)
    ours, exact = dataclasses.replace(layer, queries=layer.queries * 100).attend(*run(0, 150, 1))
    torch.testing.assert_close(ours, exact, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_growing_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long ring: eight chunks of 64, then of 128."""
    monkeypatch.setattr(attention_sizes, "LONGEST_WINDOW", 100)
    Layer.random(SMALL, width=34, num_positions=520).check(*run(0, 510, 3))


def test_missing_pages_and_rows_that_see_nothing() -> None:
    layer = Layer.random(SMALL, width=4)
    layer.cache.table[0, 1] = -1
    layer.cache.table[2] = -1
    ours = layer.check(*run(0, 30, 3), (2, 0, 40, 0, 0), (1, 0, 0, 0, 0))
    assert not ours[3:].any()


def test_fresh_rows_that_see_each_other() -> None:
    """Blocks of two requests, the second with a window into its block; and one without any context."""
    spans: list[Span] = [(0, 0, 20, 0, 4)] * 3 + [
        (1, 30, 40, 4, 7),
        (1, 32, 40, 5, 9),
        (1, 0, 0, 7, 9),
        (1, 0, 5, 3, 3),
    ]
    Layer.random(SMALL, width=4).check(*spans, with_fresh=True)


@pytest.mark.parametrize("sizes", [(3, 1, 24), pytest.param((4, 2, 64), marks=pytest.mark.slow)], ids=str)
def test_other_shapes_in_larger_query_tiles(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Head sizes and shares that are no powers of two; slabs of rows; a program that takes several items."""
    limits = module.device_limits(0)._replace(num_processors=3)
    monkeypatch.setattr(module, "device_limits", lambda _: limits)
    monkeypatch.setattr(attention_sizes, "SCRATCH_BYTES", 1)
    Layer.random(sizes, width=3).check(*run(0, 20, 6))


def test_no_rows() -> None:
    layer = Layer.random(SMALL, width=3)
    spans = torch.empty(0, 5, dtype=torch.int32, device=DEVICE)
    assert attention(layer.queries[:0], layer.cache, spans, scale=1.0).shape == (0, 2, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TRUE_SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 16, 31, 64, 256])
def test_a_row_has_the_same_bits_among_any_number(shape: str, count: int) -> None:
    """Rows of one seat from position 700 on, then of two; every one of them alone as well."""
    layer = Layer.random(TRUE_SIZES[shape], width=128, num_positions=2000)
    window = 1024 if shape == "sliding" else None
    spans = run(0, 700, count, window)
    together, exact = layer.attend(*spans)
    assert_near(together, exact)
    for row in range(0, count, max(1, count // 16)):
        assert torch.equal(layer.attend(spans[row])[0][0], together[row]), row
    companions = [*run(1, 40, 5, window), *spans, SPARE, *run(2, 1500, 3, window)]
    assert torch.equal(layer.attend(*companions)[0][5 : 5 + count], together)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TRUE_SIZES)
def test_true_sizes_over_a_long_context(shape: str) -> None:
    """Growing chunks at their last level, and what `check` asks."""
    layer = Layer.random(TRUE_SIZES[shape], width=640, num_positions=10_100)
    layer.check(*run(0, 10_000, 17), SPARE, *run(2, 0, 3), *run(1, 7_679, 4))


@pytest.mark.gpu
def test_true_sizes_of_a_draft_block() -> None:
    layer = Layer.random(TRUE_SIZES["draft"], width=64)
    layer.check(*[(0, 0, 500, 0, 4)] * 4, *[(1, 77, 589, 4, 9)] * 5, with_fresh=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TRUE_SIZES)
def test_a_captured_graph_gives_the_same(shape: str) -> None:
    """Replayed after spans and queries changed in place."""
    layer = Layer.random(TRUE_SIZES[shape], width=64, num_positions=1000)
    spans = torch.tensor(run(0, 900, 16), dtype=torch.int32, device=DEVICE)
    queries = layer.queries[900:916].clone()
    attention(queries, layer.cache, spans, scale=0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(queries, layer.cache, spans, scale=0.3)
    spans.copy_(torch.tensor([*run(1, 300, 9), *[SPARE] * 7], dtype=torch.int32))
    queries.copy_(layer.queries[100:116])
    graph.replay()
    assert torch.equal(captured, attention(queries, layer.cache, spans, scale=0.3))
