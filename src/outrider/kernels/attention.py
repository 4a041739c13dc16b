"""Attention over pages in Triton: decode, verify, prefill and block drafting, for half-precision caches.

A row's bits depend on its own query, position and span alone (design §4.2). Its keys are cut into chunks at fixed
absolute positions. A program takes one chunk, for the query heads of one key/value head and a run of rows that share a
seat: all scores first, then the values, so that each is one stream of memory; a second kernel puts a row's chunks
together in order. Keys and values are the first operand of the matrix unit and queries the second, so that more rows
only make the tile wider, and a tile that a row does not see changes nothing of it. `reference.py` has the twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels import attention_sizes
from outrider.kernels.attention_sizes import AttentionShape, Sizes, launch_of, num_stages, sizes_of
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.matmul_sizes import device_limits

CHUNKS_A_LEVEL = tl.constexpr(attention_sizes.CHUNKS_A_LEVEL)
CHUNKS_AT_ONCE = tl.constexpr(16)  # that are fetched together to be joined
JOINED_COLUMNS = 128  # of a head, by one program
LOG2_E = 1.4426950408889634
SPAN_SIZE = tl.constexpr(5)
NOT_SEEN = tl.constexpr(float("-inf"))


@triton.jit
def _chunk_of(position, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """Number of the chunk that a position lies in."""
    level = position * 0
    for each in tl.static_range(LEVELS):
        level += (position >= CHUNKS_A_LEVEL * CHUNK * ((2 << each) - 1)).to(tl.int32)
    start = CHUNKS_A_LEVEL * CHUNK * ((1 << level) - 1)
    return CHUNKS_A_LEVEL * level + (position - start) // (CHUNK << level)


@triton.jit
def _chunk_start(chunk, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """First position of a chunk: after 8 chunks of one size come 8 of twice the size, until they grow no more."""
    level = tl.minimum(chunk // CHUNKS_A_LEVEL, LEVELS)
    return CHUNKS_A_LEVEL * CHUNK * ((1 << level) - 1) + (chunk - CHUNKS_A_LEVEL * level) * (CHUNK << level)


@triton.jit
def _oldest(start, end, ring):
    """First cached position that is seen of start .. end - 1: the newest that fit the ring."""
    return tl.maximum(tl.maximum(start, end - ring), 0)


@triton.jit
def _tile_places(
    tile_start, first, end, nth_pages, pages_of_chunk, table, seat, group,
    page_stride, slot_stride, head_stride, page_size, table_width,
    FRESH_PART: tl.constexpr, KEY_ROWS: tl.constexpr, BLOCK_PAGES: tl.constexpr,
):  # fmt: skip
    """Positions of a tile, which of them belong to the chunk and are there, and where they are: origin and offsets."""
    tile_rows = tl.arange(0, KEY_ROWS)
    positions = tile_start + tile_rows
    seen = (positions >= first) & (positions < end)
    if FRESH_PART:
        origin, offsets = tile_start * slot_stride, tile_rows * slot_stride
    elif BLOCK_PAGES > 0:  # a tile lies in one page
        nth = tile_start // page_size - first // page_size
        page = tl.sum(tl.where(nth_pages == nth, pages_of_chunk, 0))
        seen = seen & (page >= 0)
        origin = page.to(tl.int64) * page_stride + tile_start % page_size * slot_stride
        offsets = tile_rows * slot_stride
    else:
        pages = tl.load(table + seat * table_width + positions // page_size % table_width, mask=seen, other=-1)
        seen = seen & (pages >= 0)
        origin = page_size * 0
        offsets = pages.to(tl.int64) * page_stride + positions % page_size * slot_stride
    return positions, seen, origin + group * head_stride, offsets


@triton.jit
def attention_part_kernel(
    queries, keys, values, table, spans, scores, sums, largest, totals,
    num_rows, num_items, num_tiles, query_stride, page_stride, slot_stride, head_stride, page_size, table_width,
    num_parts, scores_stride, scale,
    WHOLE_TILES: tl.constexpr, FRESH_PART: tl.constexpr, NUM_GROUPS: tl.constexpr, HEADS_A_GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, LINES: tl.constexpr, KEY_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, NUM_STAGES: tl.constexpr, BLOCK_PAGES: tl.constexpr,
):  # fmt: skip
    """Item after item: one chunk, or the fresh rows, of one key/value head, for runs of rows that share a seat.

    A run ends where the seat changes or at a border of rows. With few rows every row has an item, and those of rows
    within a run have nothing to do; with many there is one for all between two borders, which takes run after run.
    """
    RUN_ROWS: tl.constexpr = LINES // HEADS_A_GROUP
    lines = tl.arange(0, LINES)
    offsets = lines // HEADS_A_GROUP
    columns = tl.arange(0, BLOCK_D)
    nth_pages = tl.arange(0, BLOCK_PAGES if BLOCK_PAGES > 0 else 1)
    own_scores = scores + tl.program_id(0).to(tl.int64) * scores_stride + lines[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # Neighbours share keys where many rows do; with few, each program gets its share of those with nothing to do.
        if WHOLE_TILES:
            tile, head_part = item % num_tiles, item // num_tiles
        else:
            tile, head_part = item // (num_items // num_tiles), item % (num_items // num_tiles)
        group = head_part % NUM_GROUPS
        heads = group * HEADS_A_GROUP + lines % HEADS_A_GROUP
        if WHOLE_TILES:
            row = tile * RUN_ROWS
            after = tl.minimum(row + RUN_ROWS, num_rows)
        else:
            row = tile
            seat_before = tl.load(spans + tl.maximum(row - 1, 0) * SPAN_SIZE)
            begins_run = (row % RUN_ROWS == 0) | (seat_before != tl.load(spans + row * SPAN_SIZE))
            after = row + begins_run.to(tl.int32)
        while row < after:
            # Which row and head each line of the tile is, and what it sees. All at once, since loads that wait for
            # each other would cost more than the keys.
            fits = (offsets < RUN_ROWS - row % RUN_ROWS) & (row + offsets < num_rows)
            line_rows = (row + offsets).to(tl.int64)
            seat = tl.load(spans + row * SPAN_SIZE)
            seats = tl.load(spans + line_rows * SPAN_SIZE, mask=fits, other=-1)
            SPAN: tl.constexpr = 3 if FRESH_PART else 1
            starts = tl.load(spans + line_rows * SPAN_SIZE + SPAN, mask=fits, other=0)
            ends = tl.load(spans + line_rows * SPAN_SIZE + SPAN + 1, mask=fits, other=0)
            if not FRESH_PART:
                starts = _oldest(starts, ends, page_size * table_width)
            run_rows = tl.min(tl.where(seats == seat, RUN_ROWS, offsets))
            inside = fits & (offsets < tl.where(seat < 0, 0, run_rows))
            sees = inside & (starts < ends)
            first = tl.min(tl.where(sees, starts, 2147483647))
            end = tl.max(tl.where(sees, ends, 0))
            if FRESH_PART:
                part = num_parts
            else:
                # Of the chunks of the run, the one whose number leaves this part as remainder: there is at most one.
                # The newest chunks are the largest, and go first.
                part = num_parts - 1 - head_part // NUM_GROUPS
                chunk = _chunk_of(tl.minimum(first, end), CHUNK, LEVELS)
                chunk += (part + num_parts - chunk % num_parts) % num_parts
                first = tl.maximum(first, _chunk_start(chunk, CHUNK, LEVELS))
                end = tl.minimum(end, _chunk_start(chunk + 1, CHUNK, LEVELS))
            if first < end:
                pages_of_chunk = nth_pages
                if not FRESH_PART and BLOCK_PAGES > 0:
                    # Read before the loops: an address that waits for its page would leave no time to fetch ahead.
                    logical_pages = first // page_size + nth_pages
                    entries = table + seat * table_width + logical_pages % table_width
                    pages_of_chunk = tl.load(entries, mask=logical_pages <= (end - 1) // page_size, other=-1)
                query_at = line_rows[:, None] * query_stride + heads[:, None] * HEAD_SIZE + columns[None, :]
                query_tile = tl.load(
                    queries + query_at, mask=inside[:, None] & (columns < HEAD_SIZE)[None, :], other=0.0
                )
                origin = first // KEY_ROWS * KEY_ROWS
                tile_best = tl.full([KEY_ROWS, LINES], NOT_SEEN, tl.float32)
                for tile_start in tl.range(origin, end, KEY_ROWS, num_stages=NUM_STAGES):
                    positions, seen, place, slots_here = _tile_places(
                        tile_start, first, end, nth_pages, pages_of_chunk, table, seat, group,
                        page_stride, slot_stride, head_stride, page_size, table_width,
                        FRESH_PART, KEY_ROWS, BLOCK_PAGES,
                    )  # fmt: skip
                    # What no row of the run sees is not read: a slot may hold anything, and 0 * NaN would be NaN.
                    is_key = seen[:, None] & (columns < HEAD_SIZE)[None, :]
                    key_at = keys + place + (slots_here[:, None] + columns[None, :])
                    key_tile = tl.load(key_at, mask=is_key, other=0.0)
                    found = tl.dot(key_tile, tl.trans(query_tile), input_precision="ieee") * scale
                    in_span = (positions[:, None] >= starts[None, :]) & (positions[:, None] < ends[None, :])
                    found = tl.where(seen[:, None] & in_span, found, NOT_SEEN)
                    tile_best = tl.maximum(tile_best, found)
                    tl.store(own_scores + (positions - origin)[:, None] * LINES, found)
                tl.debug_barrier()  # each thread reads what others wrote
                best = tl.max(tile_best, axis=0)
                base = tl.where(best == NOT_SEEN, 0.0, best)
                tile_total = tl.zeros([KEY_ROWS, LINES], tl.float32)
                summed = tl.zeros([BLOCK_D, LINES], tl.float32)
                for tile_start in tl.range(origin, end, KEY_ROWS, num_stages=NUM_STAGES):
                    positions, seen, place, slots_here = _tile_places(
                        tile_start, first, end, nth_pages, pages_of_chunk, table, seat, group,
                        page_stride, slot_stride, head_stride, page_size, table_width,
                        FRESH_PART, KEY_ROWS, BLOCK_PAGES,
                    )  # fmt: skip
                    is_value = seen[:, None] & (columns < HEAD_SIZE)[None, :]
                    value_at = values + place + (slots_here[:, None] + columns[None, :])
                    value_tile = tl.load(value_at, mask=is_value, other=0.0)
                    weights = tl.exp2(tl.load(own_scores + (positions - origin)[:, None] * LINES) - base[None, :])
                    tile_total += weights
                    weighed = weights.to(value_tile.dtype)
                    summed = tl.dot(tl.trans(value_tile), weighed, summed, input_precision="ieee")
                tl.debug_barrier()  # before the next run's scores
                slots = (line_rows * NUM_GROUPS * HEADS_A_GROUP + heads) * (num_parts + 1) + part
                tl.store(
                    sums + slots[None, :] * HEAD_SIZE + columns[:, None],
                    summed,
                    mask=inside[None, :] & (columns < HEAD_SIZE)[:, None],
                )
                tl.store(largest + slots, best, mask=inside)
                tl.store(totals + slots, tl.sum(tile_total, axis=0), mask=inside)
            row += run_rows


@triton.jit
def attention_join_kernel(
    sums,
    largest,
    totals,
    spans,
    outputs,
    ring,
    num_parts,
    HAS_FRESH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """A program a row, head and piece of it: its chunks in order."""
    row, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < HEAD_SIZE
    own_span = spans + row * SPAN_SIZE
    is_live = tl.load(own_span) >= 0
    end = tl.where(is_live, tl.load(own_span + 2), 0)
    start = _oldest(tl.load(own_span + 1), end, ring)
    first = _chunk_of(start, CHUNK, LEVELS)
    after = _chunk_of(tl.maximum(end - 1, start), CHUNK, LEVELS) + (start < end).to(tl.int32)
    own = (row.to(tl.int64) * NUM_HEADS + head) * (num_parts + 1)

    parts = tl.arange(0, BLOCK_PARTS)
    is_used = (parts < num_parts) & ((parts + num_parts - first % num_parts) % num_parts < after - first)
    if HAS_FRESH:
        has_fresh = tl.load(own_span + 3) < tl.where(is_live, tl.load(own_span + 4), 0)
        is_used = is_used | (parts == tl.where(has_fresh, num_parts, -1))
    best = tl.max(tl.load(largest + own + parts, mask=is_used, other=NOT_SEEN))
    best = tl.where(best == NOT_SEEN, 0.0, best)
    total = 0.0
    summed = tl.zeros([COLUMNS], tl.float32)
    chunk = first
    while chunk < after:
        # One after the other, so that the order is the same whatever the threads; loads do not wait for each other.
        for nth in tl.static_range(CHUNKS_AT_ONCE):
            slot, is_own = own + (chunk + nth) % num_parts, chunk + nth < after
            own_size = tl.where(is_own, HEAD_SIZE, 0)
            weight = tl.exp2(tl.load(largest + slot, mask=is_own, other=NOT_SEEN) - best)
            total += tl.load(totals + slot, mask=is_own, other=0.0) * weight
            summed += tl.load(sums + slot * HEAD_SIZE + columns, mask=columns < own_size, other=0.0) * weight
        chunk += CHUNKS_AT_ONCE
    if HAS_FRESH:
        # A row that sees none of them left nothing in this slot to read.
        slot, is_given = own + num_parts, is_column & (columns >= tl.where(has_fresh, 0, HEAD_SIZE))
        weight = tl.exp2(tl.where(has_fresh, tl.load(largest + slot), NOT_SEEN) - best)
        total += tl.where(has_fresh, tl.load(totals + slot), 0.0) * weight
        summed += tl.load(sums + slot * HEAD_SIZE + columns, mask=is_given, other=0.0) * weight
    result = tl.where(total > 0.0, summed / tl.where(total > 0.0, total, 1.0), 0.0)
    tl.store(outputs + (row.to(tl.int64) * NUM_HEADS + head) * HEAD_SIZE + columns, result, mask=is_column)


def attention(
    queries: Tensor,
    cache: LayerCache,
    spans: Tensor,
    *,
    scale: float,
    fresh_k: Tensor | None = None,
    fresh_v: Tensor | None = None,
) -> Tensor:
    """`Kernels.attention`: queries [R, H, D] over what spans int32 [R, 5] names of the cache and of fresh rows.

    What a request's own rows hold must be finite: rows of one run share the tiles of what any of them sees.
    """
    assert queries.stride()[1:] == (queries.shape[2], 1), f"heads of a row must be dense: {queries.stride()}"
    outputs = queries.new_empty(queries.shape)
    shape = _shape(queries, cache)
    sizes = sizes_of(len(queries), shape, device_limits(queries.device.index or 0))
    spans = spans.contiguous()
    for start in range(0, len(queries), sizes.rows_at_once):
        rows = slice(start, start + sizes.rows_at_once)
        _attend(queries[rows], cache, fresh_k, fresh_v, spans[rows], outputs[rows], shape, sizes, scale=scale)
    return outputs


def _shape(queries: Tensor, cache: LayerCache) -> AttentionShape:
    (_, num_heads, head_size), (_, page_size, num_kv_heads, _) = queries.shape, cache.keys.shape
    return AttentionShape(num_heads, num_kv_heads, head_size, cache.window, cache.num_slots, page_size)


def _attend(
    queries: Tensor,
    cache: LayerCache,
    fresh_k: Tensor | None,
    fresh_v: Tensor | None,
    spans: Tensor,
    outputs: Tensor,
    shape: AttentionShape,
    sizes: Sizes,
    *,
    scale: float,
) -> None:
    """One slab of rows: parts of the context, parts of the fresh rows, and their sum."""
    num_rows, num_heads, head_size = queries.shape
    tiling, num_parts, num_lines, num_groups = sizes.tiling, sizes.num_parts, sizes.num_lines, cache.keys.shape[2]
    floats = queries.new_empty(0, dtype=torch.float32)
    slots = num_rows, num_heads, num_parts + 1
    sums, largest, totals = (floats.new_empty(*slots, *tail) for tail in ((head_size,), (), ()))
    sources = [(cache.keys, cache.values, launch_of(num_rows, shape, sizes))]
    if fresh_k is not None and fresh_v is not None:
        sources.append((fresh_k[None], fresh_v[None], launch_of(num_rows, shape, sizes, num_fresh=len(fresh_k))))
    for keys, values, launch in sources:
        assert keys.stride() == values.stride() and keys.stride(3) == 1, (keys.stride(), values.stride())  # noqa: PT018
        attention_part_kernel[(launch.num_programs,)](
            queries,
            keys,
            values,
            cache.table,
            spans,
            floats.new_empty(launch.num_programs * launch.scores_stride),
            sums,
            largest,
            totals,
            num_rows,
            launch.num_items,
            launch.num_tiles,
            queries.stride(0),
            *keys.stride()[:3],
            cache.keys.shape[1],
            cache.table.shape[1],
            num_parts,
            launch.scores_stride,
            scale * LOG2_E,
            WHOLE_TILES=launch.num_tiles < num_rows,
            FRESH_PART=keys is not cache.keys,
            NUM_GROUPS=num_groups,
            HEADS_A_GROUP=num_heads // num_groups,
            BLOCK_D=sizes.head_block,
            LINES=num_lines,
            KEY_ROWS=tiling.key_rows,
            NUM_STAGES=num_stages(tiling, num_lines, sizes.head_block, sizes.limits),
            BLOCK_PAGES=sizes.block_pages,
            num_warps=tiling.num_warps,
            maxnreg=tiling.max_registers,
            **sizes.constants,
        )
    joined_columns = min(JOINED_COLUMNS, sizes.head_block)
    attention_join_kernel[(num_rows, num_heads, triton.cdiv(head_size, joined_columns))](
        sums,
        largest,
        totals,
        spans,
        outputs,
        cache.num_slots,
        num_parts,
        HAS_FRESH=len(sources) > 1,
        NUM_HEADS=num_heads,
        COLUMNS=joined_columns,
        BLOCK_PARTS=triton.next_power_of_2(num_parts + 1),
        num_warps=1,
        **sizes.constants,
    )
