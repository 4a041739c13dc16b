"""How attention is cut on a device, and the scratch memory that takes: plain numbers, known without Triton or a GPU."""

from __future__ import annotations

from typing import NamedTuple

from outrider.kernels.matmul_sizes import Limits

SLIDING_CHUNK, FULL_CHUNK = 128, 64  # positions of a chunk, and of the first ones where they grow
CHUNKS_A_LEVEL = 8  # chunks of one size before they double
FULL_LEVELS = 4  # doublings
MOST_ROWS_WITH_PROGRAMS = 64  # of a pass; with more, programs that have nothing to do would be most of the time
LONGEST_WINDOW = 4096  # positions; over more, chunks grow, or a long context would have too many
SCRATCH_BYTES = 512 << 20  # for the parts of a pass; more rows than it has room for are served in turn
MIN_HEAD_BLOCK, MIN_LINES = 16, 16  # least sizes of a matrix instruction


class Tiling(NamedTuple):
    """How the products are cut on one kind of GPU; `key_rows` and `num_warps` are the same for any number of rows."""

    key_rows: int  # positions of a tile; a power of two, at most FULL_CHUNK
    most_lines: int  # of a query tile: query heads of one key/value head times rows of a run
    num_warps: int
    num_programs: int  # on one multiprocessor
    max_registers: int | None = None  # a thread; fewer than the compiler would take let two programs share


HOPPER_TILINGS = {128: Tiling(64, 32, 8, 2, 128), 256: Tiling(64, 32, 4, 2), 512: Tiling(64, 64, 8, 1)}
"""By head size, for GPUs whose instruction takes 64 keys at least."""
OTHER_TILINGS = {128: Tiling(32, 32, 4, 2), 256: Tiling(32, 16, 4, 1), 512: Tiling(32, 16, 4, 1)}
"""By head size, for GPUs whose instruction takes 16, and with less shared memory."""


def tiling_for(head_size: int, limits: Limits) -> Tiling:
    """The tiling of a head size on a device; constant, or rows would not get the same bits in every pass."""
    size = 128 if head_size <= 128 else 256 if head_size <= 256 else 512
    return (HOPPER_TILINGS if limits.is_hopper else OTHER_TILINGS)[size]


def num_stages(tiling: Tiling, num_lines: int, head_block: int, limits: Limits) -> int:
    """Tiles of keys, or of values with their scores, that are fetched ahead, as far as shared memory has room."""
    room = limits.shared_bytes // tiling.num_programs - 4096
    tile_bytes = 2 * tiling.key_rows * head_block
    with_queries = (room - 2 * num_lines * head_block) // tile_bytes
    with_scores = (room - 2 * tiling.key_rows * num_lines) // (tile_bytes + 4 * tiling.key_rows * num_lines)
    most = 4 if limits.is_hopper else 2  # elsewhere addresses of more tiles spill
    return max(2, min(most, with_queries, with_scores))


class AttentionShape(NamedTuple):
    """A layer's heads and cache, as its kernels see them."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    num_slots: int  # positions that the cache holds of a seat
    page_size: int


class Sizes(NamedTuple):
    """What launches for one shape of layer have in common."""

    limits: Limits
    tiling: Tiling
    num_lines: int
    head_block: int  # numbers of a head, up to a power of two
    block_pages: int  # of a chunk, at most; 0 where pages are smaller than tiles of keys
    num_parts: int  # places for a row's chunks; a chunk goes to the place that its number leaves as remainder
    rows_at_once: int
    constants: dict[str, int]  # of both kernels


class Launch(NamedTuple):
    """How one launch over the cache, or over fresh rows, shares out its work."""

    num_tiles: int  # of rows
    num_items: int
    num_programs: int
    scores_stride: int  # float32 scores of a program


def sizes_of(num_rows: int, shape: AttentionShape, limits: Limits) -> Sizes:
    """For a pass of so many rows."""
    heads_a_group, page_size = shape.num_heads // shape.num_kv_heads, shape.page_size
    tiling = tiling_for(shape.head_size, limits)
    most_lines = max(tiling.most_lines, power_of_2(heads_a_group))
    num_lines = min(max(power_of_2(max(num_rows, 1) * heads_a_group), MIN_LINES), most_lines)
    seen = min(shape.window or shape.num_slots, shape.num_slots) + most_lines // heads_a_group
    chunk, levels = (SLIDING_CHUNK, 0) if seen <= LONGEST_WINDOW else (FULL_CHUNK, FULL_LEVELS)
    num_parts = most_chunks(seen, chunk=chunk, levels=levels)
    row_bytes, run_rows = parts_bytes(1, shape, num_parts), most_lines // heads_a_group
    most_pages = -(-(chunk << levels) // page_size) + (chunk % page_size > 0)
    return Sizes(
        limits,
        tiling,
        num_lines,
        head_block=max(power_of_2(shape.head_size), MIN_HEAD_BLOCK),
        block_pages=0 if page_size % tiling.key_rows else power_of_2(most_pages),
        num_parts=num_parts,
        rows_at_once=max(SCRATCH_BYTES // row_bytes // run_rows, 1) * run_rows,
        constants={"HEAD_SIZE": shape.head_size, "CHUNK": chunk, "LEVELS": levels},
    )


def launch_of(num_rows: int, shape: AttentionShape, sizes: Sizes, *, num_fresh: int | None = None) -> Launch:
    """Over the cache; or over so many fresh rows, which are one part."""
    tiling, num_tiles = sizes.tiling, num_rows
    if num_rows > MOST_ROWS_WITH_PROGRAMS:
        num_tiles = -(-num_rows // (sizes.num_lines // (shape.num_heads // shape.num_kv_heads)))
    num_parts, num_keys = 1, num_fresh
    if num_keys is None:
        num_parts = sizes.num_parts
        num_keys = SLIDING_CHUNK if sizes.constants["LEVELS"] == 0 else FULL_CHUNK << FULL_LEVELS
    num_items = num_parts * shape.num_kv_heads * num_tiles
    num_programs = min(num_items, sizes.limits.num_processors * tiling.num_programs)
    return Launch(
        num_tiles,
        num_items,
        num_programs,
        scores_stride=(-(-num_keys // tiling.key_rows) + 1) * tiling.key_rows * sizes.num_lines,
    )


def parts_bytes(num_rows: int, shape: AttentionShape, num_parts: int) -> int:
    """Of each row and head, for each chunk and the fresh rows: D sums, the largest score and the total, all float32."""
    return 4 * num_rows * shape.num_heads * (num_parts + 1) * (shape.head_size + 2)


def scratch_bytes(num_rows: int, shape: AttentionShape, limits: Limits, *, num_fresh: int = 0) -> int:
    """Scratch of attention in a pass of so many rows: parts of the rows served at once, and scores of all programs."""
    sizes = sizes_of(num_rows, shape, limits)
    at_once = min(num_rows, sizes.rows_at_once)
    launches = [launch_of(at_once, shape, sizes)]
    if num_fresh:
        launches.append(launch_of(at_once, shape, sizes, num_fresh=num_fresh))
    scores = max(4 * launch.num_programs * launch.scores_stride for launch in launches)
    return parts_bytes(at_once, shape, sizes.num_parts) + scores


def most_chunks(num_positions: int, *, chunk: int, levels: int) -> int:
    """Most chunks that so many successive positions touch, wherever they start."""
    count = 1  # the first one may be entered at its end
    for _ in range(levels):
        if num_positions <= CHUNKS_A_LEVEL * chunk:
            break
        num_positions -= CHUNKS_A_LEVEL * chunk
        count, chunk = count + CHUNKS_A_LEVEL, 2 * chunk
    return count + -(-num_positions // chunk)


def power_of_2(number: int) -> int:
    """The least that is not less than a number from 1 on."""
    return 1 << (number - 1).bit_length()
