"""Where keys and values may be written: what the scheduler asks of the caches before a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class CacheSpace(Protocol):
    """Room in the caches, in pages. A seat's positions are written only after they were reserved."""

    num_pages: int
    max_positions: int
    """Most positions that one request alone can have."""

    @property
    def num_free(self) -> int:
        """Pages that no seat uses."""
        ...

    def admit(self, seat: int, token_ids: Sequence[int], *, is_shareable: bool) -> int | None:
        """Give a free seat to a text; None if there is no room for all of it now.

        Returns how many of its first tokens an earlier text left in the caches; always fewer than there are, and 0
        where the text may not be shared, because its embeddings are not all made from token ids.
        """
        ...

    def reserve(self, seat: int, num_positions: int) -> bool:
        """Make positions below `num_positions` writable; False if there is no room, and then nothing changed."""
        ...

    def publish(self, seat: int, token_ids: Sequence[int], boundaries: Sequence[int]) -> None:
        """Let later texts share the seat's first positions, which hold `token_ids`.

        `boundaries` are token counts at which another text is likely to go another way.
        """
        ...

    def release(self, seat: int) -> None:
        """Take the seat back; what it published may stay."""
        ...


class SeatSpace:
    """Caches in which every seat owns room for a whole context: one page a seat, and nothing is shared."""

    def __init__(self, *, num_seats: int, context_length: int) -> None:
        self.num_pages, self.max_positions = num_seats, context_length
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Seats without a request."""
        return self.num_pages - len(self._taken)

    def admit(self, seat: int, token_ids: Sequence[int], *, is_shareable: bool) -> int | None:
        """Always room for it, never a token of it."""
        del token_ids, is_shareable
        self._taken.add(seat)
        return 0

    def reserve(self, seat: int, num_positions: int) -> bool:
        """Always room for a whole context."""
        return seat in self._taken and num_positions <= self.max_positions

    def publish(self, seat: int, token_ids: Sequence[int], boundaries: Sequence[int]) -> None:
        """Nothing is shared."""

    def release(self, seat: int) -> None:
        """The seat is free again."""
        self._taken.remove(seat)
