"""Kernels by half and part. Seen red: markers counted as kernels, halves swapped, a sum not divided by cycles."""

from __future__ import annotations

import pytest
import torch

from outrider.backends.kernel_trace import (
    MARKER,
    KernelEvent,
    list_kernels,
    part_of,
    read_events,
    split_halves,
    summarize_parts,
    trace_events,
)
from outrider.engine.graph_capture import NamedGraph


def event(name: str, start: float, duration: float = 1.0, grid: tuple[int, ...] = (1, 1, 1)) -> KernelEvent:
    return KernelEvent(name, start, duration, grid)


def marked(*stretches: list[str]) -> list[KernelEvent]:
    """Kernels in order, a marker before each stretch but the first."""
    names = [*stretches[0], *(name for stretch in stretches[1:] for name in (f"{MARKER}(long)", *stretch))]
    return [event(name, float(at)) for at, name in enumerate(names)]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("product_kernel", "products"),
        ("gated_kernel", "rows"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "products"),
        ("best_kernel", "head"),
        ("paged_attention_kernel", "attention"),
        ("combine_attention_splits", "attention"),
        ("rms_norm_add_kernel", "rows"),
        ("head_norm_rope_cache", "rows"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_parts_by_name(name: str, part: str) -> None:
    assert part_of(name) == part


def test_events_belong_to_the_half_that_was_replayed_last() -> None:
    events = marked(["early"], ["load"], ["d1"], ["v1", "v2"], ["d2"], ["v3", "read"])
    halves = split_halves(events, ["verify", "draft", "verify", "draft", "verify"])
    assert {half: [each.name for each in events] for half, events in halves.items()} == {
        "draft": ["d1", "d2"],
        "verify": ["early", "load", "v1", "v2", "v3", "read"],
    }


def test_without_replays_there_is_one_cycle_and_a_marker_too_many_is_seen() -> None:
    assert list(split_halves(marked(["a", "b"]), [])) == ["cycle"]
    with pytest.raises(ValueError, match="zip"):
        split_halves(marked([], ["a"], ["b"]), ["verify"])


def test_milliseconds_a_cycle_beside_the_floor() -> None:
    halves = {"verify": [event("product_kernel", 0, 1500), event("product_kernel", 2, 2500), event("odd", 3, 10)]}
    rows = summarize_parts(halves, {"verify": {"products": 4_000_000_000}}, num_cycles=2, bandwidth=4e12)
    assert rows[0] == {
        "half": "verify",
        "part": "products",
        "ms": 2.0,
        "floor_ms": 1.0,
        "tb_per_s": 2.0,
        "floor_share": 0.5,
    }
    assert (rows[1]["part"], rows[1]["ms"], rows[1]["floor_ms"]) == ("other", 0.005, None)


def test_kernels_are_listed_by_grid_costliest_first() -> None:
    halves = {"draft": [event("a", 0, 1), event("b", 1, 8), event("a", 2, 3), event("a", 3, 2, grid=(9, 1, 1))]}
    rows = list_kernels(halves, num_cycles=2)
    assert [(row["kernel"], row["grid"], row["per_cycle"], row["us"]) for row in rows] == [
        ("b", [1, 1, 1], 0.5, 8.0),
        ("a", [1, 1, 1], 1.0, 2.0),
        ("a", [9, 1, 1], 0.5, 2.0),
    ]


def test_only_what_the_device_did_is_read_in_order_of_time() -> None:
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "late", "ts": 5, "dur": 1, "args": {"grid": [3, 2, 1]}},
            {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 9},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy", "ts": 2, "dur": 1, "args": {}},
            {"ph": "M", "name": "process_name"},
        ]
    }
    assert read_events(trace) == [event("Memcpy", 2, grid=()), event("late", 5, grid=(3, 2, 1))]


@pytest.mark.gpu
def test_kernels_of_real_graphs_are_told_apart() -> None:
    left, right = torch.ones(512, 512, device="cuda"), torch.ones(512, 512, device="cuda")
    graphs = [NamedGraph(), NamedGraph()]
    graphs[0].half, graphs[1].half = "draft", "verify"
    left @ right
    torch.cuda.synchronize()
    with torch.cuda.graph(graphs[0]):
        left.mul_(1.0)
    with torch.cuda.graph(graphs[1]):
        left @ right

    def cycles() -> None:
        for _ in range(3):
            for graph in graphs:
                graph.replay()

    halves = split_halves(*trace_events(cycles))
    assert list(halves) == ["draft", "verify"]
    assert len(halves["draft"]) == 3
    assert len(halves["verify"]) >= 3
    assert all(part_of(each.name) != "products" for each in halves["draft"])
    assert any(part_of(each.name) == "products" for each in halves["verify"])
