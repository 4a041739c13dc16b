"""Which kernels a cycle spends its time in: events of torch's profiler, by half of the cycle and by part.

Halves are told apart by a marker: a spinning kernel that does nothing, put before each replay of a captured graph.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from outrider.backends.floor import floor_figures
from outrider.backends.replays import watched_replays

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MARKER = "spin_kernel"  # what torch.cuda._sleep launches
PARTS = (
    ("attention", r"attention|attend|flash|fmha"),
    ("head", r"best|logits|argmax"),
    ("products", r"product|gemm|gemv|cutlass|cublas|nvjet|splitk"),
    ("rows", r"norm|heads|gated|embed"),
    ("copies", r"memcpy|memset|copy|gather|scatter|index"),
)
"""The part of a kernel is the first whose pattern is found in its name, in lower case; else it is "other"."""


class KernelEvent(NamedTuple):
    """One kernel or copy on the device."""

    name: str
    start_us: float
    duration_us: float
    grid: tuple[int, ...]


def part_of(kernel_name: str) -> str:
    """The part that a kernel belongs to, by its name."""
    return next((part for part, pattern in PARTS if re.search(pattern, kernel_name.lower())), "other")


def trace_events(work: Callable[[], object]) -> list[KernelEvent]:
    """What the device did during `work`, markers included, in order of time."""
    with (
        watched_replays(_launch_marker, lambda: None),
        profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler,
    ):
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_events(json.loads(path.read_text()))


def _launch_marker() -> None:
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]


def read_events(trace: Mapping[str, Any]) -> list[KernelEvent]:
    """Device events of a trace in Chrome's format, in order of time."""
    found = [
        KernelEvent(
            str(event["name"]),
            float(event["ts"]),
            float(event["dur"]),
            tuple(event.get("args", {}).get("grid", ())),
        )
        for event in trace["traceEvents"]
        if event.get("cat") in DEVICE_CATEGORIES
    ]
    return sorted(found, key=lambda event: event.start_us)


def split_halves(events: Sequence[KernelEvent], *, num_cycles: int) -> dict[str, list[KernelEvent]]:
    """Events of all cycles by half: "draft" and "verify" where two graphs were replayed a cycle, "verify" where one.

    Anything else is one "cycle". What runs between two replays counts to the earlier one, except before the first.
    """
    stretches: list[list[KernelEvent]] = [[]]
    for event in events:
        if MARKER in event.name:
            stretches.append([])
        else:
            stretches[-1].append(event)
    num_replays = len(stretches) - 1
    names = {num_cycles: ["verify"], 2 * num_cycles: ["draft", "verify"]}.get(num_replays, ["cycle"])
    halves: dict[str, list[KernelEvent]] = {name: [] for name in names}
    halves[names[-1]] += stretches[0]
    for index, stretch in enumerate(stretches[1:]):
        halves[names[index % len(names)]] += stretch
    return halves


def summarize_parts(
    halves: Mapping[str, Sequence[KernelEvent]],
    floor_bytes: Mapping[str, Mapping[str, int]],
    *,
    num_cycles: int,
    bandwidth: float,
) -> list[dict[str, Any]]:
    """A row a half and part, milliseconds a cycle beside the floor: bytes ÷ bandwidth in bytes a second."""
    rows = []
    for half, events in halves.items():
        parts = {part: [event for event in events if part_of(event.name) == part] for part in (*dict(PARTS), "other")}
        for part, found in parts.items():
            if found:
                ms = sum(event.duration_us for event in found) / num_cycles / 1e3
                num_bytes = floor_bytes.get(half, {}).get(part)
                rows.append({"half": half, "part": part, "ms": ms, **floor_figures(ms, num_bytes, bandwidth)})
    return rows


def list_kernels(halves: Mapping[str, Sequence[KernelEvent]], *, num_cycles: int) -> list[dict[str, Any]]:
    """Kernels by half, name and grid, costliest first: launches a cycle, and microseconds a launch."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[float]] = {}
    for half, events in halves.items():
        for event in events:
            groups.setdefault((half, event.name, event.grid), []).append(event.duration_us)
    rows = [
        {
            "half": half,
            "part": part_of(name),
            "kernel": name,
            "grid": list(grid),
            "per_cycle": len(times) / num_cycles,
            "us": sum(times) / len(times),
        }
        for (half, name, grid), times in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["per_cycle"] * row["us"])
