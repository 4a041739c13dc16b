"""Cache sizes, spans and rotary tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.models.attention import GivenRows, allocate_caches, causal_spans, num_cache_slots, rope_table
from outrider.models.config import LayerKind, LayerSpec, RopeSpec
from tests.toy import CPU, dense_rope, toy_target_config


@pytest.mark.parametrize(("window", "slots"), [(None, 128), (8, 13), (126, 128)])
def test_a_window_keeps_room_for_the_rows_of_a_pass(window: int | None, slots: int) -> None:
    assert num_cache_slots(window, context_length=128, max_rows=5) == slots


def test_caches_have_each_layers_own_shape() -> None:
    caches = allocate_caches(
        toy_target_config().layers, num_seats=3, context_length=128, max_rows=5, dtype=torch.float64, device=CPU
    )
    sliding, full = (3, 13, 2, 8), (3, 128, 1, 24)
    assert [tuple(cache.keys.shape) for cache in caches] == [sliding, sliding, sliding, full, sliding, full]
    assert all(cache.values.shape == cache.keys.shape and cache.keys.dtype == torch.float64 for cache in caches)
    assert len({cache.keys.data_ptr() for cache in caches} | {cache.values.data_ptr() for cache in caches}) == 12


def test_spans_end_at_the_row_and_start_a_window_before() -> None:
    seats, positions = torch.tensor([0, 2, 2, -1]), torch.tensor([0, 7, 8, 0])
    assert causal_spans(seats, positions, None).tolist() == [
        [0, 0, 1, 0, 0],
        [2, 0, 8, 0, 0],
        [2, 0, 9, 0, 0],
        [-1, 0, 1, 0, 0],
    ]
    windowed = causal_spans(seats, positions, 8)
    assert windowed[:, 1].tolist() == [0, 0, 1, 0]
    assert windowed.dtype == torch.int32


def test_rope_table_turns_pairs_by_position_over_factor() -> None:
    spec = RopeSpec(theta=10_000.0, factor=8.0)
    table = rope_table(spec, head_dim=16, num_positions=20, dtype=torch.float64, device=CPU)
    heads = torch.ones(20, 1, 16, dtype=torch.float64)
    turned = dense_rope(heads, torch.arange(20), spec)[:, 0]
    torch.testing.assert_close(table.cos - table.sin, turned[:, :8], rtol=0, atol=1e-12)
    torch.testing.assert_close(table.cos + table.sin, turned[:, 8:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_rope_table_is_at_least_float32(dtype: torch.dtype, kept: torch.dtype) -> None:
    table = rope_table(RopeSpec(theta=1e4), head_dim=8, num_positions=4, dtype=dtype, device=CPU)
    assert table.cos.dtype == table.sin.dtype == kept


def test_a_layer_that_reads_anothers_keys_has_no_cache_of_its_own() -> None:
    spec = LayerSpec(kind=LayerKind.FULL, num_kv_heads=1, head_dim=4, window=None, rope=RopeSpec(theta=1e4))
    reader = replace(spec, cache_source=1)
    first, second, third = allocate_caches(
        [spec, spec, reader], num_seats=1, context_length=8, max_rows=2, dtype=torch.float32, device="cpu"
    )
    assert third.keys is second.keys
    assert third.values is second.values
    assert first.keys is not second.keys


def test_pairs_beyond_the_rotated_share_do_not_turn() -> None:
    spec = RopeSpec(theta=100.0, factor=2.0, rotated=0.5)
    table = rope_table(spec, head_dim=8, num_positions=3, dtype=torch.float64, device="cpu")
    angles = torch.tensor([1.0, 100.0**-0.25, 0.0, 0.0], dtype=torch.float64) / 2.0
    torch.testing.assert_close(table.cos[2], (2 * angles).cos())
    torch.testing.assert_close(table.sin[2], (2 * angles).sin())


def test_rope_table_without_numbers_has_the_same_shape() -> None:
    sizes = {"head_dim": 8, "num_positions": 3, "dtype": torch.bfloat16}
    blank = rope_table(RopeSpec(theta=1e4), **sizes, device="meta")
    table = rope_table(RopeSpec(theta=1e4), **sizes, device=CPU)
    assert blank.cos.is_meta
    assert [(part.shape, part.dtype) for part in blank] == [(part.shape, part.dtype) for part in table]


def test_given_rows_are_cut_and_filled_up() -> None:
    given = GivenRows(torch.tensor([True, False, True]), torch.arange(6.0).view(3, 2))
    cut = given.cut(1, 4)
    assert cut.is_given.tolist() == [False, True, False, False]
    assert cut.embeddings[:2].tolist() == [[2, 3], [4, 5]]
    assert cut.embeddings.shape == (4, 2)
