"""Products in Triton for int8 and int4 weights: read as they are stored, made bf16 on the way to the matrix unit.

As in `matmul.py` the weight is the first operand, K has one order, and more rows only make the tile wider. int8 numbers
are exact in bf16, and a sum is multiplied by its output's scale at the end. int4 numbers are multiplied by their
group's scale and rounded to bf16 before the product, which is what dequantising gives.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.low_bit import INT4_BLOCK, INT4_GROUP, LowBitMatrix
from outrider.kernels.matmul import best_of_tiles, capped, store_best
from outrider.kernels.matmul_sizes import ROW_TILES, TILE_OUTPUTS, Limits, Tiles, device_limits

MAX_TILE_ROWS = 128
MAX_STAGES = 8  # a stage of few bits is few bytes
HALF = tl.constexpr(INT4_BLOCK // 2)  # bytes of a block
RUN = tl.constexpr(INT4_GROUP // 2)  # inputs side by side in low bits, or in high ones
GROUPS = tl.constexpr(INT4_BLOCK // INT4_GROUP)  # of a block


def choose_low_bit_tiles(num_rows: int, num_outputs: int, limits: Limits, *, is_int4: bool) -> Tiles:
    """Tiles for so many rows; the last row tile is repeated where they are more."""
    rows = next(tile for tile in ROW_TILES if tile >= min(num_rows, MAX_TILE_ROWS))
    depth = 64 if rows == MAX_TILE_ROWS and not is_int4 else INT4_BLOCK
    stage_bytes = TILE_OUTPUTS * depth // (2 if is_int4 else 1) + rows * depth * 2
    share = 1 if -(-num_outputs // TILE_OUTPUTS) <= limits.num_processors else 2
    fitting = (limits.shared_bytes // share - 12_288) // stage_bytes  # less what layouts are changed through
    return Tiles(TILE_OUTPUTS, rows, depth, max(2, min(MAX_STAGES, fitting)), num_warps=4)


@triton.jit
def _int4_numbers(unsigned, scales, DTYPE: tl.constexpr):
    """(u - 8) * scale, rounded once, for u from 0 to 15, [O, 64], and scales of the same shape."""
    # A pattern whose last bits count whole numbers, 128 + u in bfloat16 and 2^23 + u in float32, needs no conversion.
    IS_WIDE: tl.constexpr = tl.float32 == DTYPE
    WORD: tl.constexpr = tl.int32 if IS_WIDE else tl.int16
    BITS: tl.constexpr = 0x4B000000 if IS_WIDE else 0x4300
    OFFSET: tl.constexpr = 8388616.0 if IS_WIDE else 136.0
    patterns = (unsigned | tl.full((), BITS, WORD)).to(WORD)
    return (patterns.to(DTYPE, bitcast=True) - tl.full((), OFFSET, DTYPE)) * scales


@triton.jit
def _low_bit_sums(
    inputs, values, scales, rows, columns, num_rows, num_inputs, num_outputs,
    DEPTH: tl.constexpr, IS_INT4: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """sum over k of weight[o, k] * inputs[r, k] for the outputs `columns` and `rows`, float32 [O, R]."""
    DTYPE: tl.constexpr = inputs.dtype.element_ty
    has_row = (rows < num_rows)[:, None]
    weight_rows = tl.minimum(columns, num_outputs - 1).to(tl.int64)[:, None]
    inputs_at = inputs + rows.to(tl.int64)[:, None] * num_inputs
    sums = tl.zeros((columns.shape[0], rows.shape[0]), tl.float32)
    if IS_INT4:
        num_blocks = num_inputs // DEPTH  # what is counted in blocks is known to be aligned
        places = tl.arange(0, HALF)[None, :]
        values_at = values + weight_rows * (num_blocks * HALF) + places
        scales_at = scales + weight_rows * (num_blocks * GROUPS) + tl.arange(0, GROUPS)[None, :]
        inputs_at += places // RUN * (2 * RUN) + places % RUN
        for block in range(num_blocks):
            stored = tl.load(values_at + block * HALF)
            factors = tl.load(scales_at + block * GROUPS).to(DTYPE)
            low_rows = tl.load(inputs_at + block * DEPTH, mask=has_row, other=0.0)
            high_rows = tl.load(inputs_at + block * DEPTH + RUN, mask=has_row, other=0.0)
            wide = tl.broadcast_to(factors[:, :, None], (columns.shape[0], GROUPS, RUN))
            wide = tl.reshape(wide, (columns.shape[0], HALF))
            sums = tl.dot(_int4_numbers(stored & 15, wide, DTYPE), tl.trans(low_rows), sums)
            sums = tl.dot(_int4_numbers(stored >> 4, wide, DTYPE), tl.trans(high_rows), sums)
    else:
        depths = tl.arange(0, DEPTH)[None, :]
        values_at = values + weight_rows * num_inputs + depths
        inputs_at += depths
        for tile in range(tl.cdiv(num_inputs, DEPTH)):
            at = tile * DEPTH
            if IS_WHOLE:
                stored = tl.load(values_at + at)
                row_part = tl.load(inputs_at + at, mask=has_row, other=0.0)
            else:
                is_inside = at + depths < num_inputs
                stored = tl.load(values_at + at, mask=is_inside, other=0)
                row_part = tl.load(inputs_at + at, mask=has_row & is_inside, other=0.0)
            sums = tl.dot(stored.to(DTYPE), tl.trans(row_part), sums)
        sums *= tl.load(scales + weight_rows)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def low_bit_product_kernel(
    inputs, values, scales, residual, outputs, cap, num_rows, num_inputs, num_outputs,
    TILE_O: tl.constexpr, TILE_R: tl.constexpr, DEPTH: tl.constexpr, IS_INT4: tl.constexpr,
    IS_ADDED: tl.constexpr, IS_CAPPED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """outputs[r, o] of one tile."""
    rows = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    columns = tl.program_id(1) * TILE_O + tl.arange(0, TILE_O)
    sums = _low_bit_sums(
        inputs, values, scales, rows, columns, num_rows, num_inputs, num_outputs, DEPTH, IS_INT4, IS_WHOLE
    )
    if IS_CAPPED:
        sums = capped(sums, cap)
    is_written = (columns < num_outputs)[:, None] & (rows < num_rows)[None, :]
    place = rows.to(tl.int64)[None, :] * num_outputs + columns[:, None]
    rounded = sums.to(outputs.dtype.element_ty)
    if IS_ADDED:
        rounded = tl.load(residual + place, mask=is_written, other=0.0) + rounded
    tl.store(outputs + place, rounded, mask=is_written)


@triton.jit(do_not_specialize=["num_rows"])
def low_bit_best_kernel(
    inputs, values, scales, best_values, best_ids, cap, num_rows, num_inputs, num_outputs,
    TILE_O: tl.constexpr, TILE_R: tl.constexpr, DEPTH: tl.constexpr, IS_INT4: tl.constexpr,
    IS_CAPPED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The largest product of one tile of outputs for each row, and its index; sums as in low_bit_product_kernel."""
    rows = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    columns = tl.program_id(1) * TILE_O + tl.arange(0, TILE_O)
    sums = _low_bit_sums(
        inputs, values, scales, rows, columns, num_rows, num_inputs, num_outputs, DEPTH, IS_INT4, IS_WHOLE
    )
    if IS_CAPPED:
        sums = capped(sums, cap)
    store_best(sums, best_values, best_ids, columns, rows, num_rows, num_outputs)


def low_bit_product(
    inputs: Tensor,
    weight: LowBitMatrix,
    *,
    residual: Tensor | None = None,
    cap: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """inputs [R, in] @ weight [out, in]^T (+ residual [R, out]) -> [R, out] in `dtype`, soft-capped by `cap`."""
    (num_rows, num_inputs), num_outputs = inputs.shape, weight.shape[0]
    assert num_inputs == weight.shape[1], (inputs.shape, weight.shape)
    outputs = inputs.new_empty(num_rows, num_outputs, dtype=dtype or inputs.dtype)
    tiles = choose_low_bit_tiles(num_rows, num_outputs, _limits(inputs), is_int4=weight.is_int4)
    grid = triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_outputs, tiles.outputs)
    low_bit_product_kernel[grid](
        inputs, weight.values, weight.scales, residual, outputs, cap or 0.0, num_rows, num_inputs, num_outputs,
        TILE_O=tiles.outputs, TILE_R=tiles.rows, DEPTH=tiles.depth, IS_INT4=weight.is_int4,
        IS_ADDED=residual is not None, IS_CAPPED=cap is not None, IS_WHOLE=num_inputs % tiles.depth == 0,
        num_stages=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    return outputs


def low_bit_best(inputs: Tensor, weight: LowBitMatrix, *, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """Largest (soft-capped) product of each row, float32 [R], and its index int64 [R]: ties to the lower one."""
    (num_rows, num_inputs), num_outputs = inputs.shape, weight.shape[0]
    assert num_inputs == weight.shape[1], (inputs.shape, weight.shape)
    tiles = choose_low_bit_tiles(num_rows, num_outputs, _limits(inputs), is_int4=weight.is_int4)
    grid = triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_outputs, tiles.outputs)
    tile_values = inputs.new_empty(grid[1], num_rows, dtype=torch.float32)
    tile_ids = inputs.new_empty(grid[1], num_rows, dtype=torch.int32)
    low_bit_best_kernel[grid](
        inputs, weight.values, weight.scales, tile_values, tile_ids, cap or 0.0, num_rows, num_inputs, num_outputs,
        TILE_O=tiles.outputs, TILE_R=tiles.rows, DEPTH=tiles.depth, IS_INT4=weight.is_int4,
        IS_CAPPED=cap is not None, IS_WHOLE=num_inputs % tiles.depth == 0,
        num_stages=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    return best_of_tiles(tile_values, tile_ids)


def _limits(inputs: Tensor) -> Limits:
    return device_limits(inputs.device.index or 0)
