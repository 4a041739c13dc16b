"""Attention over pages in Triton: decode, verify, prefill and block drafting, for half-precision caches.

A row's bits depend on its own query, position and span alone (design §4.2). Its keys are cut into chunks at fixed
absolute positions; a program walks one chunk tile by tile, for the query heads of one key/value head and a run of rows
that share a seat; a second kernel puts a row's chunks together in order. Rows share a program to share its keys: the
tile has the same number of query rows whatever is in it, so that the same instruction multiplies one row and many, and
a tile that a row does not see changes nothing of it. `reference.py` has the twin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.layer_cache import LayerCache

SLIDING_CHUNK, FULL_CHUNK = 128, 64  # positions of a chunk, and of the first ones where they grow
CHUNKS_A_LEVEL = tl.constexpr(8)  # chunks of one size before they double
FULL_LEVELS = 3  # doublings
CHUNKS_AT_ONCE = tl.constexpr(16)  # that are put together
JOINED_COLUMNS = 128  # of a head, by one program
MOST_ROWS_WITH_PROGRAMS = 64  # of a pass; with more, programs that have nothing to do would be most of the time
LONGEST_RING = 4096  # positions; a longer ring has growing chunks, or a long context would have too many
SCRATCH_BYTES = 512 << 20  # for the parts of a pass; more rows than it has room for are served in turn
LOG2_E = 1.4426950408889634
MIN_HEAD_BLOCK = 16  # least sum of a matrix instruction
SPAN_SIZE = tl.constexpr(5)
NOT_SEEN = tl.constexpr(float("-inf"))


class Tiling(NamedTuple):
    """How the products are cut on one kind of GPU."""

    query_rows: int  # rows of a query tile: query heads of one key/value head times rows of a run
    key_rows: int  # positions of a key tile; a power of two, at most FULL_CHUNK
    value_columns: int  # most numbers of a head that one program sums up
    num_warps: int
    num_stages: int


WARP_GROUP_TILINGS = {
    128: Tiling(64, 64, 128, 4, 2),
    256: Tiling(64, 32, 256, 4, 2),
    512: Tiling(64, 32, 512, 8, 2),
}
"""By head size, for GPUs whose instruction takes 64 query rows at least."""
WARP_TILINGS = {128: Tiling(16, 32, 128, 4, 2), 256: Tiling(16, 32, 256, 4, 1), 512: Tiling(16, 32, 256, 4, 1)}
"""By head size, for GPUs whose instruction takes 16."""


def architecture_of(device: torch.device) -> int:
    """90 for a GPU of compute capability 9.0; 0 where there is none, and kernels are interpreted."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tiling_for(head_size: int, device: torch.device) -> Tiling:
    """The tiling of a head size on a device; constant, or rows would not get the same bits in every pass.

    64 query rows on Hopper, where that is the least its warp-group instruction takes; 16, the least of the other
    instruction, elsewhere, where shared memory holds at most 99 KiB.
    """
    size = 128 if head_size <= 128 else 256 if head_size <= 256 else 512
    return (WARP_GROUP_TILINGS if architecture_of(device) // 10 in (9, 10) else WARP_TILINGS)[size]


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
def attention_part_kernel(
    queries,
    keys,
    values,
    table,
    spans,
    sums,
    largest,
    totals,
    num_rows,
    query_stride,
    page_stride,
    slot_stride,
    head_stride,
    page_size,
    table_width,
    num_parts,
    scale,
    WHOLE_TILES: tl.constexpr,
    FRESH_PART: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """One chunk, or the fresh rows, of one key/value head, for a run of rows that share a seat.

    A run ends where the seat changes or at a border of rows. With few rows every row has a program, and those of rows
    within a run have nothing to do; with many there is one for all between two borders, which takes run after run.
    """
    group = tl.program_id(1) % NUM_GROUPS
    RUN_ROWS: tl.constexpr = QUERY_ROWS // HEADS_A_GROUP
    lines = tl.arange(0, QUERY_ROWS)
    offsets = lines // HEADS_A_GROUP
    heads = group * HEADS_A_GROUP + lines % HEADS_A_GROUP
    columns = tl.arange(0, BLOCK_D)
    own_columns = tl.program_id(1) // NUM_GROUPS * VALUE_COLUMNS + tl.arange(0, VALUE_COLUMNS)
    if WHOLE_TILES:
        row = tl.program_id(2) * RUN_ROWS
        after = tl.minimum(row + RUN_ROWS, num_rows)
    else:
        row = tl.program_id(2)
        seat_before = tl.load(spans + tl.maximum(row - 1, 0) * SPAN_SIZE)
        begins_run = (row % RUN_ROWS == 0) | (seat_before != tl.load(spans + row * SPAN_SIZE))
        after = row + begins_run.to(tl.int32)
    while row < after:
        # Which row and head each line of the tile is, and what it sees. All at once, since loads that wait for each
        # other would cost more than the keys.
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
            # Of the chunks of the run, the one whose number leaves this part as remainder: there is at most one. The
            # newest chunks are the largest, and go first.
            part = num_parts - 1 - tl.program_id(0)
            chunk = _chunk_of(tl.minimum(first, end), CHUNK, LEVELS)
            chunk += (part + num_parts - chunk % num_parts) % num_parts
            first = tl.maximum(first, _chunk_start(chunk, CHUNK, LEVELS))
            end = tl.minimum(end, _chunk_start(chunk + 1, CHUNK, LEVELS))
        if first < end:
            first_page = first // page_size
            if not FRESH_PART and BLOCK_PAGES > 0:
                # Read before the loop: a key's address that waits for its page would leave no time to fetch ahead.
                nth_pages = tl.arange(0, BLOCK_PAGES)
                is_page = first_page + nth_pages <= (end - 1) // page_size
                entries = table + seat * table_width + (first_page + nth_pages) % table_width
                pages_of_chunk = tl.load(entries, mask=is_page, other=-1)
            query_at = line_rows[:, None] * query_stride + heads[:, None] * HEAD_SIZE + columns[None, :]
            tile = tl.load(queries + query_at, mask=inside[:, None] & (columns < HEAD_SIZE)[None, :], other=0.0)
            best = tl.full([QUERY_ROWS], NOT_SEEN, tl.float32)
            total = tl.zeros([QUERY_ROWS], tl.float32)
            summed = tl.zeros([QUERY_ROWS, VALUE_COLUMNS], tl.float32)
            for tile_start in tl.range(first // KEY_ROWS * KEY_ROWS, end, KEY_ROWS, num_stages=NUM_STAGES):
                positions = tile_start + tl.arange(0, KEY_ROWS)
                seen = (positions >= first) & (positions < end)
                if FRESH_PART:
                    places = positions.to(tl.int64) * slot_stride + group * head_stride
                else:
                    if BLOCK_PAGES > 0:  # a tile lies in one page
                        nth = tile_start // page_size - first_page
                        pages = tl.sum(tl.where(nth_pages == nth, pages_of_chunk, 0)) + tl.zeros([KEY_ROWS], tl.int32)
                    else:
                        entries = table + seat * table_width + positions // page_size % table_width
                        pages = tl.load(entries, mask=seen, other=-1)
                    seen = seen & (pages >= 0)
                    places = (
                        pages.to(tl.int64) * page_stride + positions % page_size * slot_stride + group * head_stride
                    )
                # What no row of the run sees is not read: a slot may hold anything, and 0 * NaN would be NaN.
                is_key = seen[:, None] & (columns < HEAD_SIZE)[None, :]
                key_tile = tl.load(keys + places[:, None] + columns[None, :], mask=is_key, other=0.0)
                scores = tl.dot(tile, tl.trans(key_tile), input_precision="ieee") * scale
                visible = seen[None, :] & (positions[None, :] >= starts[:, None]) & (positions[None, :] < ends[:, None])
                scores = tl.where(visible, scores, NOT_SEEN)
                new_best = tl.maximum(best, tl.max(scores, axis=1))
                base = tl.where(new_best == NOT_SEEN, 0.0, new_best)
                kept = tl.exp2(best - base)
                weights = tl.exp2(scores - base[:, None])
                is_value = seen[:, None] & (own_columns < HEAD_SIZE)[None, :]
                value_tile = tl.load(values + places[:, None] + own_columns[None, :], mask=is_value, other=0.0)
                total = total * kept + tl.sum(weights, axis=1)
                weighed = weights.to(value_tile.dtype)
                summed = tl.dot(weighed, value_tile, summed * kept[:, None], input_precision="ieee")
                best = new_best

            slots = (line_rows * NUM_GROUPS * HEADS_A_GROUP + heads) * (num_parts + 1) + part
            tl.store(
                sums + slots[:, None] * HEAD_SIZE + own_columns[None, :],
                summed,
                mask=inside[:, None] & (own_columns < HEAD_SIZE)[None, :],
            )
            tl.store(largest + slots, best, mask=inside)
            tl.store(totals + slots, total, mask=inside)
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
    """A program a row, head and piece of it: its chunks in order, sixteen at a time from a multiple of sixteen on."""
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
    for block in range(first // CHUNKS_AT_ONCE * CHUNKS_AT_ONCE, after, CHUNKS_AT_ONCE):
        chunks = block + tl.arange(0, CHUNKS_AT_ONCE)
        is_own = (chunks >= first) & (chunks < after)
        slots = own + chunks % num_parts
        weights = tl.exp2(tl.load(largest + slots, mask=is_own, other=NOT_SEEN) - best)
        total += tl.sum(tl.load(totals + slots, mask=is_own, other=0.0) * weights)
        at = slots[:, None] * HEAD_SIZE + columns[None, :]
        rows = tl.load(sums + at, mask=is_own[:, None] & is_column[None, :], other=0.0)
        summed += tl.sum(rows * weights[:, None], axis=0)
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
    sizes = _sizes(queries, cache)
    spans = spans.contiguous()
    for start in range(0, len(queries), sizes.rows_at_once):
        rows = slice(start, start + sizes.rows_at_once)
        _attend(queries[rows], cache, fresh_k, fresh_v, spans[rows], outputs[rows], sizes, scale=scale)
    return outputs


class _Sizes(NamedTuple):
    """What launches for one shape of layer have in common."""

    tiling: Tiling
    num_parts: int  # places for a row's chunks; a chunk goes to the place that its number leaves as remainder
    rows_at_once: int
    head_block: int  # numbers of a head, up to a power of two
    block_pages: int  # of a chunk, at most; 0 where pages are smaller than key tiles
    constants: dict[str, int]  # of both kernels


def _sizes(queries: Tensor, cache: LayerCache) -> _Sizes:
    _, num_heads, head_size = queries.shape
    heads_a_group = num_heads // cache.keys.shape[2]
    tiling = tiling_for(head_size, queries.device)
    tiling = tiling._replace(query_rows=max(tiling.query_rows, triton.next_power_of_2(heads_a_group)))
    run_rows, ring = tiling.query_rows // heads_a_group, cache.num_slots
    chunk, levels = (SLIDING_CHUNK, 0) if ring <= LONGEST_RING else (FULL_CHUNK, FULL_LEVELS)
    num_parts = most_chunks(ring + run_rows, chunk=chunk, levels=levels)
    row_bytes = 4 * num_heads * (num_parts + 1) * (head_size + 2)
    page_size = cache.keys.shape[1]
    most_pages = -(-(chunk << levels) // page_size) + (chunk % page_size > 0)
    return _Sizes(
        tiling,
        num_parts,
        rows_at_once=max(SCRATCH_BYTES // row_bytes // run_rows, 1) * run_rows,
        head_block=max(triton.next_power_of_2(head_size), MIN_HEAD_BLOCK),
        block_pages=0 if page_size % tiling.key_rows else triton.next_power_of_2(most_pages),
        constants={"HEAD_SIZE": head_size, "CHUNK": chunk, "LEVELS": levels},
    )


def most_chunks(num_positions: int, *, chunk: int, levels: int) -> int:
    """Most chunks that so many successive positions touch, wherever they start."""
    count = 1  # the first one may be entered at its end
    for _ in range(levels):
        if num_positions <= CHUNKS_A_LEVEL.value * chunk:
            break
        num_positions -= CHUNKS_A_LEVEL.value * chunk
        count, chunk = count + CHUNKS_A_LEVEL.value, 2 * chunk
    return count + -(-num_positions // chunk)


def _attend(
    queries: Tensor,
    cache: LayerCache,
    fresh_k: Tensor | None,
    fresh_v: Tensor | None,
    spans: Tensor,
    outputs: Tensor,
    sizes: _Sizes,
    *,
    scale: float,
) -> None:
    """One slab of rows: parts of the context, parts of the fresh rows, and their sum."""
    num_rows, num_heads, head_size = queries.shape
    tiling, num_parts = sizes.tiling, sizes.num_parts
    slots = num_rows, num_heads, num_parts + 1
    sums, largest, totals = (
        torch.empty(*slots, *tail, dtype=torch.float32, device=queries.device) for tail in ((head_size,), (), ())
    )
    value_columns = min(tiling.value_columns, sizes.head_block)
    num_splits = triton.cdiv(head_size, value_columns)
    num_groups = cache.keys.shape[2]
    num_programs = num_rows
    if num_rows > MOST_ROWS_WITH_PROGRAMS:
        num_programs = triton.cdiv(num_rows, tiling.query_rows // (num_heads // num_groups))
    sources = [(cache.keys, cache.values, False)]
    if fresh_k is not None and fresh_v is not None:
        sources.append((fresh_k[None], fresh_v[None], True))
    for keys, values, is_fresh in sources:
        assert keys.stride() == values.stride() and keys.stride(3) == 1, (keys.stride(), values.stride())  # noqa: PT018
        attention_part_kernel[(1 if is_fresh else num_parts, num_groups * num_splits, num_programs)](
            queries,
            keys,
            values,
            cache.table,
            spans,
            sums,
            largest,
            totals,
            num_rows,
            queries.stride(0),
            *keys.stride()[:3],
            cache.keys.shape[1],
            cache.table.shape[1],
            num_parts,
            scale * LOG2_E,
            WHOLE_TILES=num_programs < num_rows,
            FRESH_PART=is_fresh,
            NUM_GROUPS=num_groups,
            HEADS_A_GROUP=num_heads // num_groups,
            BLOCK_D=sizes.head_block,
            VALUE_COLUMNS=value_columns,
            QUERY_ROWS=tiling.query_rows,
            KEY_ROWS=tiling.key_rows,
            NUM_STAGES=tiling.num_stages,
            BLOCK_PAGES=sizes.block_pages,
            num_warps=tiling.num_warps,
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
        **sizes.constants,
    )
