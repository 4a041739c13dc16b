"""The memory floor of a cycle: bytes that must be read once, by part, over the best bandwidth that a read reaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.backends.account import drafter_bytes_by_kind, target_bytes_by_kind
from outrider.models.config import LayerSpec
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget

READ_BYTES = {"cuda": 8 << 30, "cpu": 256 << 20}  # far more than any cache holds
READ_REPEATS = 10
_NOT_READ = {"embedding and head", "per-layer table", "norms and tables", "own embedding and head"}


@dataclass(frozen=True)
class CycleBytes:
    """Bytes that the halves of a cycle read, by part: "products", "head", "attention".

    Weights count once a half, keys and values once a request; activations, norms and table look-ups are left out. The
    projection of taps counts to verify, after which it runs. The draft half is empty where nothing is drafted.
    """

    draft: dict[str, int]
    verify: dict[str, int]

    @property
    def total(self) -> int:
        """Of the whole cycle."""
        return sum(self.draft.values()) + sum(self.verify.values())


def cycle_bytes(
    target: GemmaTarget, drafter: DFlashDrafter | None, *, context_tokens: int, batch: int
) -> CycleBytes | None:
    """What a cycle of `batch` requests reads that have `context_tokens` positions each; None for a target with experts.

    Which experts a cycle reads depends on its rows.
    """
    if target.config.experts is not None:
        return None
    held = target_bytes_by_kind(target)
    head_bytes = held["embedding and head"]
    verify = {
        "products": sum(num for kind, num in held.items() if kind not in _NOT_READ),
        "head": head_bytes,
        "attention": batch * _context_bytes(target.config.layers, context_tokens, target.dtype),
    }
    if drafter is None:
        return CycleBytes({}, verify)
    own = drafter_bytes_by_kind(drafter)
    verify["products"] += own["projection of taps"]
    is_shared = drafter.head is target.embedding
    draft = {
        "products": sum(num for kind, num in own.items() if kind not in _NOT_READ and kind != "projection of taps"),
        "head": head_bytes if is_shared else own["own embedding and head"],
        "attention": batch * _context_bytes(drafter.config.layers, context_tokens, target.dtype),
    }
    return CycleBytes(draft, verify)


def _context_bytes(layers: Sequence[LayerSpec], context_tokens: int, dtype: torch.dtype) -> int:
    """Keys and values that one request's rows see together, a window's being that of one row."""
    return sum(
        2 * spec.num_kv_heads * spec.head_dim * min(context_tokens, spec.window or context_tokens) * dtype.itemsize
        for spec in layers
    )


def floor_figures(ms: float, num_bytes: int | None, bandwidth: float) -> dict[str, float | None]:
    """`{floor_ms, tb_per_s, floor_share}` of something that took so long and must read so much; None where unknown."""
    if not num_bytes or ms <= 0:
        return {"floor_ms": None, "tb_per_s": None, "floor_share": None}
    floor_ms = num_bytes / bandwidth * 1e3
    return {"floor_ms": floor_ms, "tb_per_s": num_bytes / ms / 1e9, "floor_share": floor_ms / ms}


def read_bandwidth(device: torch.device, *, num_bytes: int | None = None) -> float:
    """Bytes a second of the fastest of some sums over READ_BYTES of float32: the least work a read can do."""
    values = torch.ones((num_bytes or READ_BYTES[device.type]) // 4, dtype=torch.float32, device=device)
    seconds = [seconds_of(lambda: values.sum(), device) for _ in range(READ_REPEATS)]
    return values.nbytes / min(seconds)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: between events on the device, or by the host's clock on a CPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = timing_event(), timing_event()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def timing_event() -> torch.cuda.Event:
    """An event on the current device that remembers when it was reached."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
