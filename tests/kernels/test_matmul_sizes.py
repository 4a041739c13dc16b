"""How products are cut. Seen red: splits of K forgotten."""

from __future__ import annotations

from outrider.kernels.matmul_sizes import Limits, best_bytes, choose_tiles, num_splits, partials_bytes

HOPPER_LIMITS = Limits(132, 227 << 10, is_hopper=True)
SMALL_LIMITS = Limits(82, 99 << 10, is_hopper=False)
SHAPES_31B = {"qkv": (16_384, 5376), "o": (5376, 8192), "full o": (5376, 16_384), "down": (5376, 21_504)}


def test_rows_change_the_row_tile_alone() -> None:
    for limits in (HOPPER_LIMITS, SMALL_LIMITS):
        for is_gated in (False, True):
            found = [choose_tiles(rows, 5376, limits, is_gated=is_gated) for rows in (1, 16, 17, 64, 100, 200, 4096)]
            assert [tiles.rows for tiles in found][:4] == [16, 16, 32, 64]
            assert all(128 % tiles.depth == 0 for tiles in found)  # splits of K end where 128 inputs do
            for tiles in found:
                stage_bytes = (tiles.outputs * (2 if is_gated else 1) + tiles.rows) * tiles.depth * 2
                assert stage_bytes * tiles.num_stages < limits.shared_bytes, tiles


def test_k_is_split_where_outputs_are_few() -> None:
    assert [num_splits(*shape) for shape in SHAPES_31B.values()] == [1] * len(SHAPES_31B)
    assert num_splits(640, 2048) == 4
    assert num_splits(640, 128) == 1


def test_scratch_by_hand() -> None:
    assert partials_bytes(3, 640, 2048) == 4 * 4 * 3 * 640
    assert partials_bytes(3, 640, 128) == 0  # one split writes its sums at once
    assert best_bytes(2, 262_144) == 2 * (4096 * 8 + 12)
