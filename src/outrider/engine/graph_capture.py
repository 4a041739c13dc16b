"""Functions of tensors captured as CUDA graphs, whole or in two parts, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack

import torch


class NamedGraph(torch.cuda.CUDAGraph):
    """A captured graph that knows which half of a cycle it belongs to, "draft" or "verify"."""

    half: str


InParts = Callable[[Callable[[], None]], None]
"""A function that calls what it is given, at most once, where its second part begins."""


class Graphs:
    """Functions of tensors that stay where they are, captured by name and replayed; without CUDA they are called.

    The parts of a function can be launched apart. Without CUDA the second is the whole function and the first nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[Hashable, list[NamedGraph]] = {}
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, half: str, key: Hashable, function: InParts, *, part: int | None = None) -> None:
        """Launch a function, or its part 0 or 1, on the current stream; the first time for a key takes long."""
        if self.device.type != "cuda":
            if part != 0:
                function(_do_nothing)
            return
        if key not in self._graphs:
            self._graphs[key] = self._captured(half, function)
        for graph in self._graphs[key] if part is None else [self._graphs[key][part]]:
            graph.replay()

    def has(self, key: Hashable) -> bool:
        """True where to launch it takes no longer than it should."""
        return self.device.type != "cuda" or key in self._graphs

    def _captured(self, half: str, function: InParts) -> list[NamedGraph]:
        """Run once, so that kernels are compiled and faults are raised, then capture; running twice changes nothing."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function(_do_nothing)
        current.wait_stream(self._stream)
        graphs = list[NamedGraph]()
        with ExitStack() as capture:

            def begin_part() -> None:
                capture.close()
                graphs.append(NamedGraph())
                graphs[-1].half = half
                # Other threads may use the device meanwhile: theirs is no part of the capture.
                capture.enter_context(
                    torch.cuda.graph(
                        graphs[-1], pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                    )
                )

            begin_part()
            function(begin_part)
        return graphs


def _do_nothing() -> None:
    pass
