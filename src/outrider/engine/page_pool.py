"""The pages of one group of layers: who holds them, and which can be found again by what they hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class PagePool:
    """Pages 0 .. num_pages - 1. A page is free, held by one or more seats, or kept because it can be found by its key.

    A page with a key holds whole, committed positions and is never written again. Held by nobody it counts as free,
    and the one that was let go first is taken first when no other is left.
    """

    def __init__(self, num_pages: int, *, max_cached_pages: int | None = None) -> None:
        """At most `max_cached_pages` are kept for their keys while nobody holds them; None sets no limit."""
        self.num_pages = num_pages
        self.max_cached_pages = num_pages if max_cached_pages is None else max_cached_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._num_holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # found by key, held by nobody; let go first comes first

    @property
    def num_free(self) -> int:
        """Pages that can be taken: nobody holds them, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free pages that can still be found."""
        return len(self._cached)

    def take(self) -> int:
        """A page for one holder to write; there must be a free one."""
        if not self._blank:
            self._evict()
        page = self._blank.pop()
        self._num_holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder for a page that has a key."""
        assert page in self._key_of, f"page {page} has no key: only whole committed pages are shared"
        self._cached.pop(page, None)
        self._num_holders[page] += 1

    def let_go(self, page: int) -> None:
        """One holder less; with none left the page is free, and cached if it has a key."""
        assert self._num_holders[page] > 0, f"nobody holds page {page}"
        self._num_holders[page] -= 1
        if self._num_holders[page]:
            return
        if page not in self._key_of:
            self._blank.append(page)
            return
        self._cached[page] = None
        while len(self._cached) > self.max_cached_pages:
            self._evict()

    def name(self, page: int, key: bytes) -> bool:
        """Make a held page findable, unless it is already or another held page with this content is; True if it was.

        It takes the place of a page that nobody holds: that one would be given up long before those that follow it.
        """
        assert self._num_holders[page] > 0, f"nobody holds page {page}"
        if page in self._key_of:
            return False
        other = self._page_of.get(key)
        if other is not None and self._num_holders[other]:
            return False
        self.forget(key)
        self._page_of[key], self._key_of[page] = page, key
        return True

    def forget(self, key: bytes) -> None:
        """The page with this key, if there is one, can be found no more; it is blank if nobody holds it."""
        page = self._page_of.pop(key, None)
        if page is None:
            return
        del self._key_of[page]
        if page in self._cached:
            del self._cached[page]
            self._blank.append(page)

    def find(self, key: bytes) -> int | None:
        """The page with this key."""
        return self._page_of.get(key)

    def is_writable(self, page: int) -> bool:
        """True where one seat alone holds the page and nobody can find it."""
        return self._num_holders[page] == 1 and page not in self._key_of

    def forget_all(self) -> None:
        """Nothing can be found any more; cached pages are blank, held ones stay held."""
        while self._cached:
            self._evict()
        self._page_of.clear()
        self._key_of.clear()

    def _evict(self) -> None:
        self.forget(self._key_of[next(iter(self._cached))])

    def assert_consistent(self, held: Iterable[int]) -> None:
        """Check the accounts against `held`, every page as often as seats hold it."""
        holders = Counter(held)
        assert self._num_holders == [holders[page] for page in range(self.num_pages)]
        unheld = [page for page in range(self.num_pages) if not holders[page]]
        assert sorted([*self._blank, *self._cached]) == unheld, "a page is lost, or free twice"
        assert {key: page for page, key in self._key_of.items()} == self._page_of
        assert set(self._cached) == set(self._key_of) & set(unheld)
        assert self.num_cached <= self.max_cached_pages
