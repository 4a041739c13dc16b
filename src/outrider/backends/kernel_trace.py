"""Which kernels a cycle spends its time in: events of torch's profiler, by half of the cycle and by part.

Replays of captured graphs are told apart by a marker, a spinning kernel that does nothing, put before each of them.
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
OTHER_HALF = "cycle"  # of graphs without a name, and of a cycle that replays none
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


def trace_events(work: Callable[[], object]) -> tuple[list[KernelEvent], list[str]]:
    """What the device did during `work`, in order of time, markers included; and the half that each replay was of."""
    replayed: list[str] = []

    def before(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(getattr(graph, "half", OTHER_HALF))
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    with (
        watched_replays(before, lambda: None),
        profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler,
    ):
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_events(json.loads(path.read_text())), replayed


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


def split_halves(events: Sequence[KernelEvent], replayed: Sequence[str]) -> dict[str, list[KernelEvent]]:
    """Events by the half of a cycle that was replayed last; all of one "cycle" where nothing was.

    What comes before the first replay counts to it.
    """
    stretches: list[list[KernelEvent]] = [[]]
    for event in events:
        if MARKER in event.name:
            stretches.append([])
        else:
            stretches[-1].append(event)
    names = [replayed[0], *replayed] if replayed else [OTHER_HALF]
    halves: dict[str, list[KernelEvent]] = {}
    for name, stretch in zip(names, stretches, strict=True):
        halves.setdefault(name, []).extend(stretch)
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
