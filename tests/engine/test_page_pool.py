"""Who holds a page, who finds it, and which is given up first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.page_pool import PagePool


def named(pool: PagePool, key: bytes) -> int:
    """A page that was written, named and let go."""
    page = pool.take()
    pool.name(page, key)
    pool.let_go(page)
    return page


def test_pages_are_taken_once_and_come_back() -> None:
    pool = PagePool(3)
    pages = [pool.take() for _ in range(3)]
    assert sorted(pages) == [0, 1, 2]
    assert pool.num_free == 0
    pool.assert_consistent(pages)
    pool.let_go(pages[1])
    assert pool.num_free == 1
    assert pool.take() == pages[1]
    with pytest.raises(AssertionError, match="nobody holds page"):
        PagePool(1).let_go(0)


def test_a_named_page_is_found_shared_and_kept() -> None:
    pool = PagePool(2)
    page = pool.take()
    assert pool.is_writable(page)
    with pytest.raises(AssertionError, match="only whole committed pages"):
        pool.share(page)
    pool.name(page, b"a")
    assert not pool.is_writable(page)
    pool.share(page)
    pool.let_go(page)
    assert (pool.num_free, pool.num_cached) == (1, 0)  # one holder is left
    pool.let_go(page)
    assert (pool.num_free, pool.num_cached) == (2, 1)
    assert pool.find(b"a") == page
    pool.share(page)
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.assert_consistent([page])


def test_the_first_page_found_by_a_key_stays_the_one() -> None:
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    pool.name(first, b"a")
    pool.name(second, b"a")
    pool.name(first, b"b")
    assert pool.find(b"a") == first
    assert pool.find(b"b") is None
    assert pool.is_writable(second)
    pool.assert_consistent([first, second])


def test_a_held_page_takes_the_name_of_one_that_nobody_holds() -> None:
    """Or the first would be given up before those that follow the second."""
    pool = PagePool(2)
    first, second = named(pool, b"a"), pool.take()
    assert pool.name(second, b"a")
    assert (pool.find(b"a"), pool.num_cached, pool.num_free) == (second, 0, 1)
    assert pool.is_writable(pool.take())
    pool.assert_consistent([first, second])


def test_one_page_can_be_forgotten() -> None:
    pool = PagePool(3)
    named(pool, b"a")
    held = pool.take()
    pool.name(held, b"b")
    for key in (b"a", b"b", b"c"):
        pool.forget(key)
        assert pool.find(key) is None
    assert (pool.num_cached, pool.num_free) == (0, 2)
    pool.assert_consistent([held])


def test_cached_pages_go_last_and_the_oldest_of_them_first() -> None:
    pool = PagePool(4)
    pages = {key: named(pool, key) for key in (b"a", b"b", b"c")}
    pool.share(pages[b"a"])
    pool.let_go(pages[b"a"])  # used again: the newest now
    blank = pool.take()
    assert blank not in pages.values()
    assert [pool.take(), pool.take()] == [pages[b"b"], pages[b"c"]]
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [pages[b"a"], None, None]
    pool.assert_consistent([blank, pages[b"b"], pages[b"c"]])


def test_no_more_are_kept_than_allowed() -> None:
    pool = PagePool(4, max_cached_pages=1)
    named(pool, b"a")
    second = named(pool, b"b")
    assert (pool.num_cached, pool.num_free) == (1, 4)
    assert (pool.find(b"a"), pool.find(b"b")) == (None, second)
    assert PagePool(4, max_cached_pages=0).num_cached == 0
    named(none := PagePool(4, max_cached_pages=0), b"a")
    assert none.find(b"a") is None
    none.assert_consistent([])


def test_forgetting_leaves_what_is_held() -> None:
    pool = PagePool(3)
    named(pool, b"a")
    page = pool.take()
    pool.name(page, b"b")
    pool.forget_all()
    assert (pool.find(b"a"), pool.find(b"b"), pool.num_cached, pool.num_free) == (None, None, 0, 2)
    pool.assert_consistent([page])
    pool.let_go(page)
    assert (pool.num_cached, pool.num_free) == (0, 3)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60))
def test_accounts_are_exact_whatever_happens(num_pages: int, max_cached: int, steps: list[tuple[int, int]]) -> None:
    pool, held = PagePool(num_pages, max_cached_pages=min(max_cached, num_pages)), list[int]()
    for action, number in steps:
        key = bytes([number % 8])
        if action == 0 and pool.num_free:
            held.append(pool.take())
        elif action == 1 and held:
            pool.let_go(held.pop(number % len(held)))
        elif action == 2 and held:
            pool.name(held[number % len(held)], key)
        elif action == 3 and (page := pool.find(key)) is not None:
            pool.share(page)
            held.append(page)
        elif action == 4 and number == 0:
            pool.forget_all()
        elif action == 4:
            pool.forget(key)
        pool.assert_consistent(held)
        assert pool.num_free == num_pages - len(Counter(held))
