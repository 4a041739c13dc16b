"""What happens to a row between two products, in Triton: norms, gates, embeddings, and heads on their way to the pages.

One program a row (or a part of it, or a head of it), so that a row's bits do not depend on the others. Numbers are
float32 inside and are rounded where `reference.py`, the twin, rounds. Import this where Triton is installed only; every
launch is fit for a CUDA graph: no shape depends on data and nothing is read back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.heads import HeadNorms, HeadRows
from outrider.kernels.layer_cache import LayerCache

BLOCK = 1024  # numbers a program of `gated` and `embed` handles
GELU_FACTOR = tl.constexpr(2 * (2 / torch.pi) ** 0.5)
GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def norm_kernel(
    inputs,
    weight,
    residual,
    next_weight,
    outputs,
    normed,
    input_stride,
    residual_stride,
    size,
    eps,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    # All that is read, before the first sum: a load behind one would wait for it, and then for memory.
    values = tl.load(inputs + row * input_stride + columns, mask=inside, other=0.0)
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    if next_weight is not None:
        next_factors = tl.load(next_weight + columns, mask=inside, other=0.0)
    result = _normalized(values, factors, size, eps)
    if residual is not None:
        total = (added.to(tl.float32) + result.to(tl.float32)).to(values.dtype)
        result = (total.to(tl.float32) * scale).to(values.dtype)
    tl.store(outputs + row * size + columns, result, mask=inside)
    if next_weight is not None:
        tl.store(normed + row * size + columns, _normalized(result, next_factors, size, eps), mask=inside)


@triton.jit
def _normalized(values, factors, size, eps):
    wide = values.to(tl.float32)
    return (wide * tl.rsqrt(tl.sum(wide * wide) / size + eps) * factors.to(tl.float32)).to(values.dtype)


@triton.jit
def activated(gate, IS_SILU: tl.constexpr):
    """SiLU, or GELU by its tanh formula, of float32 numbers."""
    # 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
    inner = gate if IS_SILU else GELU_FACTOR * (gate + GELU_CUBIC * gate * gate * gate)
    return gate * tl.sigmoid(inner)


@triton.jit
def gated_kernel(
    inputs, factors, outputs, input_stride, factor_stride, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(inputs + row * input_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(factors + row * factor_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(outputs + row * size + columns, activated(gate, IS_SILU) * up, mask=inside)


@triton.jit
def embed_kernel(token_ids, table, outputs, table_stride, size, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    token_id = tl.load(token_ids + row)
    values = tl.load(table + token_id * table_stride + columns, mask=inside, other=0.0)
    tl.store(outputs + row * size + columns, values.to(tl.float32) * scale, mask=inside)


@triton.jit
def heads_kernel(
    queries,
    keys,
    values,
    q_norm,
    k_norm,
    v_norm,
    cos,
    sin,
    positions,
    q_out,
    k_out,
    v_out,
    seats,
    table,
    q_stride,
    k_stride,
    v_stride,
    page_stride,
    slot_stride,
    head_stride,
    page_size,
    table_width,
    eps,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row and head: queries first, then keys, then values. Without a table, rows are slots of one page."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    if queries is not None:  # noqa: SIM102 - Triton compiles what is in it only where that is so
        if head < NUM_QUERY_HEADS:
            source = queries + row * q_stride + head * 2 * HALF
            target = q_out + (row * NUM_QUERY_HEADS + head) * 2 * HALF
            _finish_head(source, target, q_norm, cos, sin, position, eps, True, HALF, BLOCK)
            return
    if keys is not None:
        page, slot = row * 0, row
        if table is not None:
            seat = tl.load(seats + row)
            if seat < 0:
                return
            page = tl.load(table + seat * table_width + position // page_size % table_width).to(tl.int64)
            slot = position % page_size
            if page < 0:
                return
        place = page * page_stride + slot * slot_stride
        group = head - NUM_QUERY_HEADS
        if group < NUM_KV_HEADS:
            source = keys + row * k_stride + group * 2 * HALF
            target = k_out + place + group * head_stride
            _finish_head(source, target, k_norm, cos, sin, position, eps, True, HALF, BLOCK)
        else:
            group -= NUM_KV_HEADS
            source = values + row * v_stride + group * 2 * HALF
            target = v_out + place + group * head_stride
            _finish_head(source, target, v_norm, cos, sin, position, eps, False, HALF, BLOCK)


@triton.jit
def _finish_head(
    source, target, norm, cos, sin, position, eps, ROTATES: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    pairs = tl.arange(0, BLOCK)
    inside = pairs < HALF
    first = tl.load(source + pairs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pairs, mask=inside, other=0.0).to(tl.float32)
    if ROTATES:
        row_cos = tl.load(cos + position * HALF + pairs, mask=inside, other=0.0)
        row_sin = tl.load(sin + position * HALF + pairs, mask=inside, other=0.0)
    if norm is not None:
        first_factors = tl.load(norm + pairs, mask=inside, other=0.0)
        second_factors = tl.load(norm + HALF + pairs, mask=inside, other=0.0)
        inverse = tl.rsqrt(tl.sum(first * first + second * second) / (2 * HALF) + eps)
        first, second = first * inverse * first_factors, second * inverse * second_factors
    if ROTATES:
        turned = first * row_cos - second * row_sin
        second = second * row_cos + first * row_sin
        first = turned
    tl.store(target + pairs, first, mask=inside)
    tl.store(target + HALF + pairs, second, mask=inside)


def rms_norm(inputs: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`Kernels.rms_norm`: x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    rows = _rows(inputs, weight.shape[0])
    outputs = inputs.new_empty(rows.shape)
    _launch_norm(rows, weight, None, None, outputs, None, eps=eps, scale=1.0)
    return outputs.view(inputs.shape)


def rms_norm_add(inputs: Tensor, weight: Tensor, residual: Tensor, *, eps: float, scale: float = 1.0) -> Tensor:
    """`Kernels.rms_norm_add`: (residual + rms_norm(inputs)) * scale, [R, N]."""
    rows = _rows(inputs, weight.shape[0])
    outputs = inputs.new_empty(rows.shape)
    _launch_norm(rows, weight, residual, None, outputs, None, eps=eps, scale=scale)
    return outputs


def rms_norm_add_norm(
    inputs: Tensor, weight: Tensor, residual: Tensor, next_weight: Tensor, *, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`Kernels.rms_norm_add_norm`: rms_norm_add, and the norm of what it gives, [R, N] both."""
    rows = _rows(inputs, weight.shape[0])
    outputs, normed = inputs.new_empty(rows.shape), inputs.new_empty(rows.shape)
    _launch_norm(rows, weight, residual, next_weight, outputs, normed, eps=eps, scale=scale)
    return outputs, normed


def _launch_norm(
    rows: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    next_weight: Tensor | None,
    outputs: Tensor,
    normed: Tensor | None,
    *,
    eps: float,
    scale: float,
) -> None:
    num_rows, size = rows.shape
    if residual is not None:
        residual = _rows(residual, size)
        assert residual.shape == rows.shape, (residual.shape, rows.shape)
    if not num_rows:
        return
    strides = rows.stride(0), 0 if residual is None else residual.stride(0)
    block = triton.next_power_of_2(size)
    norm_kernel[(num_rows,)](
        rows,
        weight,
        residual,
        next_weight,
        outputs,
        normed,
        *strides,
        size,
        eps,
        scale,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )


def gated(inputs: Tensor, factors: Tensor, *, activation: str) -> Tensor:
    """`Kernels.gated`: activation(inputs) * factors, [R, I]; activation is 'gelu_tanh' or 'silu'."""
    rows, factor_rows = _rows(inputs, inputs.shape[-1]), _rows(factors, inputs.shape[-1])
    assert inputs.shape == factors.shape, (inputs.shape, factors.shape)
    outputs = inputs.new_empty(rows.shape)
    if rows.numel():
        grid = len(rows), triton.cdiv(rows.shape[1], BLOCK)
        strides = rows.stride(0), factor_rows.stride(0)
        is_silu = activation == "silu"
        gated_kernel[grid](rows, factor_rows, outputs, *strides, rows.shape[1], IS_SILU=is_silu, BLOCK=BLOCK)
    return outputs.view(inputs.shape)


def embed(token_ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """`Kernels.embed`: rows token_ids int64 [R] of weight [V, N], times a factor -> [R, N]."""
    assert weight.stride(1) == 1, weight.stride()
    outputs = weight.new_empty(len(token_ids), weight.shape[1])
    if len(token_ids):
        grid = len(token_ids), triton.cdiv(weight.shape[1], BLOCK)
        arguments = token_ids.contiguous(), weight, outputs, weight.stride(0), weight.shape[1], scale
        embed_kernel[grid](*arguments, BLOCK=BLOCK)
    return outputs


def finish_heads(
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
    """`Kernels.finish_heads` in one launch; rows may be slices of one wide product, [R, total]."""
    assert (projected.keys is None) == (projected.values is None), "keys and values come together"
    assert (cache is None) == (seats is None), "a cache is written where seats say"
    head_size, num_rows = 2 * cos.shape[1], len(positions)
    queries, keys, values = (None if rows is None else _rows(rows, rows.shape[-1]) for rows in projected)
    q_out, k_out, v_out = (None if rows is None else _new_heads(rows, head_size) for rows in (queries, keys, values))
    fresh = HeadRows(q_out, k_out, v_out)
    if keys is not None and cache is not None:
        fresh, k_out, v_out = HeadRows(q_out, None, None), cache.keys, cache.values
    num_heads = [0 if heads is None else heads.shape[-2] for heads in (q_out, k_out)]
    if num_rows:
        heads_kernel[(num_rows, num_heads[0] + 2 * num_heads[1])](
            queries,
            keys,
            values,
            *norms,
            cos,
            sin,
            positions.contiguous(),
            q_out,
            k_out,
            v_out,
            None if seats is None else seats.contiguous(),
            None if cache is None else cache.table,
            *(0 if rows is None else rows.stride(0) for rows in (queries, keys, values)),
            *_places(k_out, v_out),
            1 if cache is None else cache.keys.shape[1],
            1 if cache is None else cache.table.shape[1],
            eps,
            NUM_QUERY_HEADS=num_heads[0],
            NUM_KV_HEADS=num_heads[1],
            HALF=head_size // 2,
            BLOCK=triton.next_power_of_2(head_size // 2),
            num_warps=1,
        )
    return fresh


def _new_heads(rows: Tensor, head_size: int) -> Tensor:
    return rows.new_empty(len(rows), rows.shape[1] // head_size, head_size)


def _places(keys: Tensor | None, values: Tensor | None) -> tuple[int, int, int]:
    """Distances from page to page, slot to slot and head to head, of [pages, P, G, D] or of fresh rows [R, G, D]."""
    if keys is None or values is None:
        return 0, 0, 0
    assert keys.stride() == values.stride() and keys.stride(-1) == 1, (keys.stride(), values.stride())  # noqa: PT018
    *pages, slot, head, _ = keys.stride()
    return pages[0] if pages else 0, slot, head


def _rows(tensor: Tensor, size: int) -> Tensor:
    """[R, size], any distance from row to row."""
    rows = tensor if tensor.dim() == 2 else tensor.reshape(-1, size)
    assert rows.shape[1] == size, (tensor.shape, size)
    assert rows.stride(1) == 1, f"numbers of a row must lie side by side, and these are {rows.stride(1)} apart"
    return rows
