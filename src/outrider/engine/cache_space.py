"""Where keys and values may be written: what the scheduler asks of the caches before a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.engine.kv_cache import KvCache


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

    def reserve(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """Make the `num_rows` positions after the first `num_committed` writable; False if there is no room."""
        ...

    def is_reserved(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """True where `reserve` would have nothing to do."""
        ...

    def reserve_ahead(self, seat: int, *, num_committed: int, num_rows: int) -> None:
        """Do now, if there is room, what `reserve` would else do when a device waits for it."""
        ...

    def flush(self) -> None:
        """Let passes that are launched from now on see what was reserved and released."""
        ...

    def is_published(self, seat: int, *, num_tokens: int) -> bool:
        """True where to publish the seat's first so many tokens would change nothing."""
        ...

    def publish(self, seat: int, token_ids: Sequence[int], boundaries: Sequence[int]) -> None:
        """Let later texts share the seat's first positions, which hold `token_ids`; after each pass of a prompt.

        `boundaries` are token counts, some perhaps still to come, at which another text is likely to go another way.
        """
        ...

    def withdraw(self, seat: int) -> None:
        """Let no later text share what the seat holds: its rows are in doubt."""
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

    def reserve(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """Always room for a whole context."""
        return self.is_reserved(seat, num_committed=num_committed, num_rows=num_rows)

    def is_reserved(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """From the beginning."""
        return seat in self._taken and num_committed + num_rows <= self.max_positions

    def reserve_ahead(self, seat: int, *, num_committed: int, num_rows: int) -> None:
        """Nothing is ever missing."""

    def flush(self) -> None:
        """Every seat always has its page."""

    def is_published(self, seat: int, *, num_tokens: int) -> bool:
        """Nothing is shared."""
        del seat, num_tokens
        return True

    def publish(self, seat: int, token_ids: Sequence[int], boundaries: Sequence[int]) -> None:
        """Nothing is shared."""

    def withdraw(self, seat: int) -> None:
        """Nothing was shared."""

    def release(self, seat: int) -> None:
        """The seat is free again."""
        self._taken.remove(seat)


class PagedSpace:
    """Pages that all seats draw from, and prefixes that they share."""

    def __init__(self, kv_cache: KvCache, *, context_length: int) -> None:
        self.kv_cache, self.max_positions = kv_cache, context_length
        self.num_pages = kv_cache.num_pages

    @property
    def num_free(self) -> int:
        """Pages that no seat holds, those kept for later texts included."""
        return self.kv_cache.num_free_pages

    def admit(self, seat: int, token_ids: Sequence[int], *, is_shareable: bool) -> int | None:
        """Adopt the longest prefix that is still there, if the rest of the text has room, too."""
        num_found = self.kv_cache.match_prefix(token_ids) if is_shareable else 0
        self.kv_cache.adopt(seat, token_ids, num_found)
        if self.kv_cache.has_room(seat, len(token_ids)):
            return num_found
        self.kv_cache.release(seat)
        return None

    def reserve(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """Take the pages that are missing; windows then give up those that nobody will see again."""
        if self.is_reserved(seat, num_committed=num_committed, num_rows=num_rows):
            return True
        return self.kv_cache.reserve(seat, num_committed=num_committed, num_rows=num_rows)

    def is_reserved(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """As long as the seat stays in pages that were reserved before."""
        return self.kv_cache.is_reserved(seat, num_committed=num_committed, num_rows=num_rows)

    def reserve_ahead(self, seat: int, *, num_committed: int, num_rows: int) -> None:
        """Most cycles stay in pages that the seat has."""
        if num_committed + num_rows <= self.max_positions:
            self.reserve(seat, num_committed=num_committed, num_rows=num_rows)

    def flush(self) -> None:
        """Copy page tables to a device that has its own."""
        self.kv_cache.flush()

    def is_published(self, seat: int, *, num_tokens: int) -> bool:
        """Most cycles complete no page."""
        return num_tokens // self.kv_cache.plan.page_size <= len(self.kv_cache.page_keys[seat])

    def publish(self, seat: int, token_ids: Sequence[int], boundaries: Sequence[int]) -> None:
        """Whole pages only."""
        self.kv_cache.publish(seat, token_ids, boundaries)

    def withdraw(self, seat: int) -> None:
        """Those that others published count, too: one of them may be the cause."""
        self.kv_cache.withdraw(seat)

    def release(self, seat: int) -> None:
        """Its published pages stay until their memory is needed."""
        self.kv_cache.release(seat)
