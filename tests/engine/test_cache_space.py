"""Seats that own their room: free until admitted, free again once released."""

from __future__ import annotations

from outrider.engine.cache_space import SeatSpace


def test_a_seat_is_a_page() -> None:
    space = SeatSpace(num_seats=2, context_length=8)
    assert (space.num_pages, space.num_free, space.max_positions) == (2, 2, 8)
    assert not space.reserve(0, num_committed=0, num_rows=1)  # never admitted
    assert space.admit(0, [1, 2], is_shareable=True) == 0
    assert space.num_free == 1
    assert space.reserve(0, num_committed=4, num_rows=4)
    assert not space.reserve(0, num_committed=4, num_rows=5)
    assert space.is_reserved(0, num_committed=4, num_rows=4)
    assert not space.is_reserved(0, num_committed=4, num_rows=5)
    assert not space.is_reserved(1, num_committed=0, num_rows=1)
    space.publish(0, [1, 2], [2])
    space.withdraw(0)
    space.release(0)
    assert space.num_free == 2
