"""How attention is cut. Seen red: scores of fresh rows forgotten, a slab taken for the whole pass."""

from __future__ import annotations

import pytest

from outrider.kernels import attention_sizes
from outrider.kernels.attention_sizes import (
    AttentionShape,
    launch_of,
    most_chunks,
    num_stages,
    power_of_2,
    scratch_bytes,
    sizes_of,
)
from outrider.kernels.matmul_sizes import Limits

HOPPER, SMALL = Limits(132, 227 << 10, is_hopper=True), Limits(82, 99 << 10, is_hopper=False)
FULL = AttentionShape(32, 4, 512, None, 8192, 64)
SLIDING = AttentionShape(32, 16, 256, 1024, 3136, 64)


def test_a_places_for_every_chunk() -> None:
    """A run of any start touches no more chunks than there are places."""
    assert most_chunks(128, chunk=128, levels=0) == 2
    assert most_chunks(512, chunk=64, levels=4) == 9
    assert most_chunks(513, chunk=64, levels=4) == 10
    assert most_chunks(32_768, chunk=64, levels=4) == 1 + 32 + 25


def test_scratch_by_hand() -> None:
    """One row of a full layer: 8 chunks each of 64, 128, 256 and 512, the rest in chunks of 1,024, and an end."""
    num_parts = 1 + 8 * 4 + 1
    parts = 4 * 32 * (num_parts + 1) * (512 + 2)
    programs, lines = min(num_parts * 4, 132), 16
    scores = 4 * programs * (1024 + 64) * lines
    assert sizes_of(1, FULL, HOPPER).num_parts == num_parts
    assert scratch_bytes(1, FULL, HOPPER) == parts + scores
    assert scratch_bytes(1, FULL, HOPPER, num_fresh=16) == parts + scores  # fewer programs, fewer keys
    many = launch_of(1, FULL, sizes_of(1, FULL, HOPPER), num_fresh=65536)
    assert scratch_bytes(1, FULL, HOPPER, num_fresh=65536) == parts + 4 * many.num_programs * many.scores_stride


def test_more_rows_than_scratch_has_room_for_take_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scratch_bytes(2048, FULL, HOPPER) == scratch_bytes(4096, FULL, HOPPER)
    whole = scratch_bytes(2048, SLIDING, HOPPER)
    monkeypatch.setattr(attention_sizes, "SCRATCH_BYTES", 1 << 20)
    assert scratch_bytes(2048, SLIDING, HOPPER) < whole / 8


def test_tiles_fit_into_shared_memory() -> None:
    for limits in (HOPPER, SMALL):
        for shape in (FULL, SLIDING):
            sizes = sizes_of(2048, shape, limits)
            stages = num_stages(sizes.tiling, sizes.num_lines, sizes.head_block, limits)
            assert 2 <= stages <= 4
    assert [power_of_2(number) for number in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
