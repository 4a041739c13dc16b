"""Pages without tensors: every seat can hold a whole context, but a count says that it may not."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.cache_space import CacheSpace


class CountedSpace(CacheSpace):
    """Room for `num_pages` pages in all; publishes nothing. What was asked of it is in `calls`."""

    def __init__(self, num_pages: int, *, page_size: int = 4) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.max_positions = num_pages * page_size
        self.num_found = 0  # tokens that it says an earlier text left
        self.used: dict[int, int] = {}  # pages by seat
        self.published: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    @property
    def num_free(self) -> int:
        """Pages that no seat has."""
        return self.num_pages - sum(self.used.values())

    def pages(self, num_positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-num_positions // self.page_size)

    def admit(self, seat: int, token_ids: Sequence[int], *, is_shareable: bool) -> int | None:
        """Room for the whole text must be free; nothing is taken yet."""
        assert seat not in self.used, "a seat was given twice"
        if self.pages(len(token_ids)) > self.num_free:
            return None
        self.used[seat] = 0
        return self.num_found

    def reserve(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """Take what is missing."""
        missing = max(0, self.pages(num_committed + num_rows) - self.used[seat])
        if missing > self.num_free:
            return False
        self.used[seat] += missing
        return True

    def is_reserved(self, seat: int, *, num_committed: int, num_rows: int) -> bool:
        """Nothing is missing."""
        return self.pages(num_committed + num_rows) <= self.used[seat]

    def reserve_ahead(self, seat: int, *, num_committed: int, num_rows: int) -> None:
        """Nothing is taken before its time."""

    def flush(self) -> None:
        """There is nothing but a count."""

    def is_published(self, seat: int, *, num_tokens: int) -> bool:
        """All that is offered is noted."""
        del seat, num_tokens
        return False

    def publish(self, seat: int, token_ids: Sequence[int], boundaries: Sequence[int]) -> None:
        """Note it."""
        assert self.pages(len(token_ids)) <= self.used[seat]
        self.published.append((seat, tuple(token_ids), tuple(boundaries)))

    def withdraw(self, seat: int) -> None:
        """Nothing was shared."""

    def release(self, seat: int) -> None:
        """Give all back."""
        del self.used[seat]
