"""How products are cut on a device, and the scratch memory that takes: plain numbers, known without Triton or a GPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

TILE_OUTPUTS = 64  # the smallest tile of Hopper's instruction
ROW_TILES = (16, 32, 64, 128, 256)
MAX_GATED_ROWS = 128  # two sums of 256 rows do not fit in registers
MIN_PROGRAMS = 64  # fewer leave most multiprocessors without work: K is split
MIN_SPLIT_TILES = 4  # K tiles a split is worth
BEST_TILE = 128  # outputs a program of `best` compares
BEST_BYTES = 8  # a float32 and an int32 for each tile and row
HOPPER = (9, 0)


class Tiles(NamedTuple):
    """How a product is cut up. Nothing here but `rows` and what follows from it may depend on the number of rows."""

    outputs: int
    rows: int
    depth: int  # of K
    num_stages: int
    num_warps: int


class Limits(NamedTuple):
    """What a device offers."""

    num_processors: int
    shared_bytes: int
    is_hopper: bool


@functools.cache
def device_limits(index: int) -> Limits:
    """Of a CUDA device; of a small GPU where there is none and kernels are interpreted."""
    if not torch.cuda.is_available():
        return Limits(82, 99 << 10, is_hopper=False)
    found = torch.cuda.get_device_properties(index)
    is_hopper = (found.major, found.minor) == HOPPER
    return Limits(found.multi_processor_count, found.shared_memory_per_block_optin, is_hopper)  # type: ignore[attr-defined]


def choose_tiles(num_rows: int, num_outputs: int, limits: Limits, *, is_gated: bool = False) -> Tiles:
    """Tiles for so many rows; the last row tile is repeated where they are more."""
    widest = 256 if limits.is_hopper and not is_gated else 128
    rows = next((tile for tile in ROW_TILES if tile >= min(num_rows, widest)), widest)
    outputs, depth, num_warps = (128, 64, 8) if rows == 256 else (TILE_OUTPUTS, 64 if rows == 128 else 128, 4)
    stage_bytes = ((2 * outputs if is_gated else outputs) + rows) * depth * 2
    # One program on each multiprocessor must keep enough bytes in flight alone; two share the memory.
    share = 1 if -(-num_outputs // outputs) <= limits.num_processors or is_gated or rows == 256 else 2
    fitting = (limits.shared_bytes // share - 2048) // stage_bytes
    return Tiles(outputs, rows, depth, max(2, min(6 if share == 1 and not is_gated else 4, fitting)), num_warps)


def num_splits(num_outputs: int, num_inputs: int) -> int:
    """Parts that K is cut into, by the shape of the weight alone."""
    tiles, depth_tiles = -(-num_outputs // TILE_OUTPUTS), -(-num_inputs // 128)
    return max(1, min(-(-MIN_PROGRAMS // tiles), depth_tiles // MIN_SPLIT_TILES, 8))


def partials_bytes(num_rows: int, num_outputs: int, num_inputs: int) -> int:
    """Scratch of a product of so many rows with a weight [out, in]: float32 sums of each split of K, if it is cut."""
    splits = num_splits(num_outputs, num_inputs)
    return 4 * splits * num_rows * num_outputs if splits > 1 else 0


def best_bytes(num_rows: int, num_outputs: int) -> int:
    """Scratch of `best`, at most: what is the largest of each tile, and where, and of each row in the end."""
    return BEST_BYTES * num_rows * -(-num_outputs // TILE_OUTPUTS) + 12 * num_rows
