"""Heads of attention between their projection and the pages: what goes in, what comes out, and the steps one by one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from outrider.kernels.layer_cache import LayerCache


class HeadRows(NamedTuple):
    """Queries, keys and values of the rows of a pass; None where a layer makes none, or keeps none outside its cache.

    Projected they are [R, H * D], [R, G * D] and [R, G * D]; finished they are [R, H, D], [R, G, D] and [R, G, D].
    """

    queries: Tensor | None
    keys: Tensor | None
    values: Tensor | None


class HeadNorms(NamedTuple):
    """Factors [D] of the RMS norm over each head, offset included, at least float32; None leaves the heads as they are.

    Queries and keys are rotated with or without a norm.
    """

    queries: Tensor | None
    keys: Tensor | None
    values: Tensor | None


class HeadSteps(Protocol):
    """The kernels that `finish_heads` is made of (see `Kernels`)."""

    def head_norm_rope(
        self, heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, *, eps: float
    ) -> Tensor:
        """Norm over each head, then the rotation."""
        ...

    def rms_norm(self, inputs: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """Norm over the last dimension."""
        ...

    def write_cache(self, cache: LayerCache, keys: Tensor, values: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Keys and values to where the page table has them."""
        ...


def finish_heads_stepwise(
    kernels: HeadSteps,
    projected: HeadRows,
    norms: HeadNorms,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    eps: float,
    cache: LayerCache | None = None,
    seats: Tensor | None = None,
) -> HeadRows:
    """`Kernels.finish_heads` as one kernel after another."""
    head_size = 2 * cos.shape[1]

    def rotated(rows: Tensor, norm: Tensor | None) -> Tensor:
        heads = rows.view(len(rows), -1, head_size)
        return kernels.head_norm_rope(heads, norm, cos, sin, positions, eps=eps)

    queries = None if projected.queries is None else rotated(projected.queries, norms.queries)
    if projected.keys is None or projected.values is None:
        return HeadRows(queries, None, None)
    keys = rotated(projected.keys, norms.keys)
    values = projected.values.view(len(projected.values), -1, head_size)
    if norms.values is not None:
        values = kernels.rms_norm(values, norms.values, eps=eps)
    if cache is None or seats is None:
        return HeadRows(queries, keys, values)
    kernels.write_cache(cache, keys, values, seats, positions)
    return HeadRows(queries, None, None)
