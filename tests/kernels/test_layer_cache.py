"""Rings of seats as pages."""

from __future__ import annotations

import torch

from outrider.kernels.layer_cache import LayerCache


def test_every_seat_owns_one_page() -> None:
    keys, values = torch.zeros(3, 13, 2, 8), torch.ones(3, 13, 2, 8)
    cache = LayerCache.of_seats(keys, values)
    assert cache.keys is keys
    assert cache.values is values
    assert cache.table.tolist() == [[0], [1], [2]]
    assert cache.table.dtype == torch.int32
    assert cache.num_slots == 13


def test_a_ring_of_several_pages_holds_all_their_positions() -> None:
    pages = torch.zeros(9, 4, 2, 8)
    assert LayerCache(pages, pages, torch.full((2, 5), -1, dtype=torch.int32)).num_slots == 20
