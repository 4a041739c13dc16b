"""Products in Triton for bf16 weights: one K order for every number of rows (design §4.2).

The weight is the first operand of the matrix unit and the rows are the second, so that more rows only make the tile
wider: each output is summed over K in steps of the same instruction, in the same order, in the same splits, whether one
row shares the pass or 256 do. Where outputs are few, K is split between programs; the last to finish adds the parts up
in order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"
from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.matmul_sizes import BEST_TILE, Tiles, choose_tiles, device_limits, num_splits
from outrider.kernels.rows import activated


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap)."""
    e = tl.exp(-2.0 * tl.abs(x / cap))
    size = cap * ((1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -size, size)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    inputs, weight, second, residual, outputs, partials, counters,
    cap, num_rows, num_inputs, num_outputs,
    TILE_O: tl.constexpr, TILE_R: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_SILU: tl.constexpr, IS_ADDED: tl.constexpr, IS_CAPPED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """outputs[r, o] = sum over k of weight[o, k] * inputs[r, k], for one tile and one split of K."""
    row_tile, output_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = row_tile * TILE_R + tl.arange(0, TILE_R)
    columns = output_tile * TILE_O + tl.arange(0, TILE_O)
    depths = tl.arange(0, DEPTH)
    has_row, has_column = rows < num_rows, columns < num_outputs
    weight_rows = tl.minimum(columns, num_outputs - 1).to(tl.int64) * num_inputs
    weight_at = weight + weight_rows[:, None] + depths[None, :]
    inputs_at = inputs + rows.to(tl.int64)[:, None] * num_inputs + depths[None, :]
    num_tiles = tl.cdiv(num_inputs, DEPTH)
    # Splits end where 128 inputs do, whatever the depth of a tile.
    split_tiles = tl.cdiv(tl.cdiv(num_inputs, 128), SPLITS) * (128 // DEPTH)
    first = split * split_tiles
    sums = tl.zeros((TILE_O, TILE_R), tl.float32)
    if IS_GATED:
        second_at = second + weight_rows[:, None] + depths[None, :]
        second_sums = tl.zeros((TILE_O, TILE_R), tl.float32)
    for tile in range(first, tl.minimum(first + split_tiles, num_tiles)):
        at = tile * DEPTH
        if IS_WHOLE:
            part = tl.load(weight_at + at)
            row_part = tl.load(inputs_at + at, mask=has_row[:, None], other=0.0)
        else:
            is_inside = (at + depths < num_inputs)[None, :]
            part = tl.load(weight_at + at, mask=is_inside, other=0.0)
            row_part = tl.load(inputs_at + at, mask=has_row[:, None] & is_inside, other=0.0)
        sums = tl.dot(part, tl.trans(row_part), sums)
        if IS_GATED:
            if IS_WHOLE:  # noqa: SIM108 - of two branches Triton compiles one, of an expression both
                second_part = tl.load(second_at + at)
            else:
                second_part = tl.load(second_at + at, mask=is_inside, other=0.0)
            second_sums = tl.dot(second_part, tl.trans(row_part), second_sums)
    is_written = has_column[:, None] & has_row[None, :]
    place = rows.to(tl.int64)[None, :] * num_outputs + columns[:, None]
    if SPLITS > 1:
        part_size = num_rows.to(tl.int64) * num_outputs
        tl.store(partials + split * part_size + place, sums, mask=is_written)
        tl.debug_barrier()
        counter = counters + row_tile * tl.num_programs(1) + output_tile
        num_before = tl.atomic_add(counter, 1, sem="acq_rel")
        if num_before < SPLITS - 1:
            return
        tl.store(counter, 0)
        sums = tl.zeros((TILE_O, TILE_R), tl.float32)
        for part_index in range(SPLITS):
            part_at = partials + part_index * part_size + place
            sums += tl.load(part_at, mask=is_written, other=0.0, cache_modifier=".cg")
    if IS_CAPPED:
        sums = capped(sums, cap)
    if IS_GATED:
        # Rounded as if both products had been stored.
        gate = sums.to(outputs.dtype.element_ty).to(tl.float32)
        up = second_sums.to(outputs.dtype.element_ty).to(tl.float32)
        sums = activated(gate, IS_SILU) * up
    values = sums.to(outputs.dtype.element_ty)
    if IS_ADDED:
        values = tl.load(residual + place, mask=is_written, other=0.0) + values
    tl.store(outputs + place, values, mask=is_written)


@triton.jit
def store_best(sums, best_values, best_ids, columns, rows, num_rows, num_outputs):
    """Of one tile of sums [outputs, rows]: the largest of each row and its column, where best_of_tiles_kernel reads."""
    is_nan = tl.max((sums != sums).to(tl.int32), axis=0) > 0
    sums = tl.where((columns < num_outputs)[:, None] & (sums == sums), sums, float("-inf"))
    values, places = tl.max(sums, axis=0, return_indices=True, return_indices_tie_break_left=True)
    at = tl.program_id(1).to(tl.int64) * num_rows + rows
    tl.store(best_values + at, tl.where(is_nan, float("nan"), values), mask=rows < num_rows)
    tl.store(best_ids + at, tl.program_id(1) * columns.shape[0] + places, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def best_kernel(
    inputs, weight, best_values, best_ids, cap, num_rows, num_inputs, num_outputs,
    TILE_O: tl.constexpr, TILE_R: tl.constexpr, DEPTH: tl.constexpr, IS_CAPPED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The largest product of one tile of outputs for each row, and its index; the sums are those of product_kernel."""
    row_tile, output_tile = tl.program_id(0), tl.program_id(1)
    rows = row_tile * TILE_R + tl.arange(0, TILE_R)
    columns = output_tile * TILE_O + tl.arange(0, TILE_O)
    depths = tl.arange(0, DEPTH)
    has_row = rows < num_rows
    weight_at = weight + tl.minimum(columns, num_outputs - 1).to(tl.int64)[:, None] * num_inputs + depths[None, :]
    inputs_at = inputs + rows.to(tl.int64)[:, None] * num_inputs + depths[None, :]
    sums = tl.zeros((TILE_O, TILE_R), tl.float32)
    for tile in range(tl.cdiv(num_inputs, DEPTH)):
        at = tile * DEPTH
        if IS_WHOLE:
            part = tl.load(weight_at + at)
            row_part = tl.load(inputs_at + at, mask=has_row[:, None], other=0.0)
        else:
            is_inside = (at + depths < num_inputs)[None, :]
            part = tl.load(weight_at + at, mask=is_inside, other=0.0)
            row_part = tl.load(inputs_at + at, mask=has_row[:, None] & is_inside, other=0.0)
        sums = tl.dot(part, tl.trans(row_part), sums)
    if IS_CAPPED:
        sums = capped(sums, cap)
    store_best(sums, best_values, best_ids, columns, rows, num_rows, num_outputs)


@triton.jit(do_not_specialize=["num_rows"])
def best_of_tiles_kernel(tile_values, tile_ids, values, ids, num_rows, num_tiles, BLOCK: tl.constexpr):
    """The largest value of each row among its tiles', and its index: ties to the lower one; a NaN stays one."""
    row = tl.program_id(0)
    best, chosen, num_nans = float("-inf"), 0, 0
    for start in range(0, num_tiles, BLOCK):
        tiles = start + tl.arange(0, BLOCK)
        at, is_inside = tiles.to(tl.int64) * num_rows + row, tiles < num_tiles
        found = tl.load(tile_values + at, mask=is_inside, other=float("-inf"))
        num_nans += tl.sum((found != found).to(tl.int32), axis=0)
        found = tl.where(found == found, found, float("-inf"))
        value, place = tl.max(found, axis=0, return_indices=True, return_indices_tie_break_left=True)
        index = tl.load(tile_ids + (start + place).to(tl.int64) * num_rows + row)
        chosen = tl.where(value > best, index, chosen)
        best = tl.maximum(value, best)
    tl.store(values + row, tl.where(num_nans > 0, float("nan"), best))
    tl.store(ids + row, chosen.to(tl.int64))


class Products:
    """The products of one device, with the counters that splits of K meet at."""

    def __init__(self, device: torch.device) -> None:
        self.limits = device_limits(device.index or 0)
        self._counters = torch.zeros(1 << 14, dtype=torch.int32, device=device)

    def product(
        self,
        inputs: Tensor,
        weight: Tensor,
        *,
        residual: Tensor | None = None,
        cap: float | None = None,
        dtype: torch.dtype | None = None,
        splits: int | None = None,
    ) -> Tensor:
        """inputs [R, in] @ weight [out, in]^T (+ residual [R, out]) -> [R, out] in `dtype`, soft-capped by `cap`.

        K is cut into `splits` parts, by the weight's shape if that is not given.
        """
        (num_rows, num_inputs), num_outputs = inputs.shape, weight.shape[0]
        outputs = inputs.new_empty(num_rows, num_outputs, dtype=dtype or inputs.dtype)
        tiles = choose_tiles(num_rows, num_outputs, self.limits)
        splits = num_splits(num_outputs, num_inputs) if splits is None else splits
        grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_outputs, tiles.outputs), splits)
        assert grid[0] * grid[1] <= len(self._counters) or splits == 1, grid
        partials = inputs.new_empty(splits * num_rows * num_outputs if splits > 1 else 0, dtype=torch.float32)
        self._launch(grid, tiles, inputs, weight, outputs, partials, residual=residual, cap=cap)
        return outputs

    def gated_product(self, inputs: Tensor, gate: Tensor, up: Tensor, *, is_silu: bool) -> Tensor:
        """activation(inputs @ gate^T) * (inputs @ up^T) for at most MAX_GATED_ROWS rows, [R, I]."""
        num_rows, num_outputs = len(inputs), len(gate)
        outputs = inputs.new_empty(num_rows, num_outputs)
        tiles = choose_tiles(num_rows, num_outputs, self.limits, is_gated=True)
        grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_outputs, tiles.outputs), 1)
        self._launch(grid, tiles, inputs, gate, outputs, outputs, second=up, is_silu=is_silu)
        return outputs

    def _launch(
        self,
        grid: tuple[int, int, int],
        tiles: Tiles,
        inputs: Tensor,
        weight: Tensor,
        outputs: Tensor,
        partials: Tensor,
        *,
        second: Tensor | None = None,
        residual: Tensor | None = None,
        cap: float | None = None,
        is_silu: bool = False,
    ) -> None:
        num_rows, num_inputs = inputs.shape
        product_kernel[grid](
            inputs, weight, second, residual, outputs, partials, self._counters,
            cap or 0.0, num_rows, num_inputs, len(weight),
            TILE_O=tiles.outputs, TILE_R=tiles.rows, DEPTH=tiles.depth, SPLITS=grid[2],
            IS_GATED=second is not None, IS_SILU=is_silu, IS_ADDED=residual is not None, IS_CAPPED=cap is not None,
            IS_WHOLE=num_inputs % tiles.depth == 0,
            num_stages=tiles.num_stages, num_warps=tiles.num_warps,
        )  # fmt: skip

    def best(self, inputs: Tensor, weight: Tensor, *, cap: float | None = None) -> tuple[Tensor, Tensor]:
        """Largest (soft-capped) product of each row, float32 [R], and its index int64 [R]: ties to the lower one."""
        (num_rows, num_inputs), num_outputs = inputs.shape, len(weight)
        tiles = choose_tiles(num_rows, num_outputs, self.limits)
        tile_outputs = max(tiles.outputs, BEST_TILE) if self.limits.is_hopper else tiles.outputs
        grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_outputs, tile_outputs))
        tile_values = inputs.new_empty(grid[1], num_rows, dtype=torch.float32)
        tile_ids = inputs.new_empty(grid[1], num_rows, dtype=torch.int32)
        best_kernel[grid](
            inputs, weight, tile_values, tile_ids, cap or 0.0, num_rows, num_inputs, num_outputs,
            TILE_O=tile_outputs, TILE_R=tiles.rows, DEPTH=tiles.depth, IS_CAPPED=cap is not None,
            IS_WHOLE=num_inputs % tiles.depth == 0, num_stages=3, num_warps=tiles.num_warps,
        )  # fmt: skip
        return best_of_tiles(tile_values, tile_ids)


def best_of_tiles(tile_values: Tensor, tile_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Largest of the tiles' largest [T, R] of each row, float32 [R], and its index int64 [R]."""
    num_tiles, num_rows = tile_values.shape
    values, ids = tile_values.new_empty(num_rows), tile_ids.new_empty(num_rows, dtype=torch.int64)
    best_of_tiles_kernel[(num_rows,)](tile_values, tile_ids, values, ids, num_rows, num_tiles, BLOCK=1024)
    return values, ids


def merged(weights: Sequence[Tensor]) -> Tensor | None:
    """Matrices [out, in] that lie one after the other in memory, as one; None where they do not."""
    first = weights[0]
    for before, after in itertools.pairwise(weights):
        is_next = before.data_ptr() + before.numel() * before.element_size() == after.data_ptr()
        if not is_next or before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr():
            return None
    return torch.as_strided(first, (sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))
