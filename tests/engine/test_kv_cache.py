"""Pages of seats: reserved, shared, published and given up; every account exact whatever the order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.cache_plan import plan_pages
from outrider.engine.kv_cache import KvCache
from outrider.models.config import LayerKind, LayerSpec, RopeSpec

FULL = LayerSpec(kind=LayerKind.FULL, num_kv_heads=1, head_dim=2, window=None, rope=RopeSpec(theta=1e6))
SLIDING = replace(FULL, kind=LayerKind.SLIDING, num_kv_heads=2, head_dim=1, window=8)
TARGET, DRAFTER = (SLIDING, FULL, replace(FULL, num_kv_heads=3), replace(FULL, cache_source=1)), (FULL, SLIDING)
TEXT = [(7 * i * i + 3 * i) % 97 for i in range(2000)]
WINDOW, SIZE, ROWS = 8, 4, 5


def make_cache(*, num_seats: int = 2, context_length: int = 48, least: bool = False, **options: Any) -> KvCache:
    """Pages of 4 tokens, windows of 8; with `least`, as few pages as can be."""
    sizes = {"num_seats": num_seats, "context_length": context_length, "max_rows": ROWS, "page_size": SIZE}
    sizes |= {"dtype": torch.float32} | options
    plan = plan_pages(TARGET, DRAFTER, **sizes)
    if least:
        width, pages = plan.groups[0].width, -(-context_length // SIZE)
        num_bytes = [group.page_bytes * (pages if group.window is None else num_seats * width) for group in plan.groups]
        plan = plan_pages(TARGET, DRAFTER, budget_bytes=sum(num_bytes), **sizes)
    return KvCache.allocate(plan, TARGET, DRAFTER, dtype=torch.float32, device="cpu")


def fill(cache: KvCache, seat: int, token_ids: list[int], boundaries: list[int], *, start: int = 0) -> None:
    """Run a text through a seat, ROWS at a time, published as it goes."""
    for first in range(start, len(token_ids), ROWS):
        assert cache.reserve(seat, num_committed=first, num_rows=min(ROWS, len(token_ids) - first))
        cache.publish(seat, token_ids[: first + ROWS], boundaries)
    cache.assert_consistent()


def lengths(cache: KvCache, seat: int) -> list[int]:
    return [len(group.pages[seat]) for group in cache.groups]


def test_layers_share_their_groups_table_and_have_their_own_pages() -> None:
    cache = make_cache()
    first, second, third, fourth = cache.target_caches
    assert second.table is third.table
    assert first.table is not second.table
    assert second.keys.shape[1:] == (SIZE, 1, 2)
    assert third.keys.shape == (len(second.keys), SIZE, 3, 2)
    assert fourth.keys is second.keys
    assert len({layer.table.data_ptr() for layer in (*cache.target_caches, *cache.drafter_caches)}) == 4
    assert first.table.tolist() == [[-1] * 5, [-1] * 5]  # 8 + 5 positions touch at most 5 pages of 4
    layers = (*cache.target_caches, *cache.drafter_caches)
    held = {each.data_ptr(): each.nbytes for layer in layers for each in layer[:2]}
    assert sum(held.values()) == cache.plan.num_bytes


def test_pages_are_reserved_as_text_grows_and_windows_give_theirs_back() -> None:
    cache = make_cache()
    tables = [group.table for group in cache.groups]
    assert cache.reserve(0, num_committed=0, num_rows=5)
    assert lengths(cache, 0) == [2, 2, 2, 2]
    assert cache.reserve(0, num_committed=3, num_rows=5)  # up to the border: position 7 is the last
    assert lengths(cache, 0) == [2, 2, 2, 2]
    assert cache.reserve(0, num_committed=4, num_rows=5)
    assert lengths(cache, 0) == [3, 3, 3, 3]
    for committed in range(5, 42):
        assert cache.reserve(0, num_committed=committed, num_rows=5)
        cache.assert_consistent()
        first = max(0, committed - WINDOW) // SIZE
        assert min(cache.groups[0].pages[0]) == first
        assert lengths(cache, 0)[1] == (committed + 4) // SIZE + 1
    assert all(group.table is table for group, table in zip(cache.groups, tables, strict=True))
    assert cache.groups[1].table[1].tolist() == [-1] * 12
    cache.release(0)
    cache.assert_consistent()
    assert cache.num_free_pages == cache.num_pages


def test_what_is_reserved_is_known_until_it_is_published_or_released() -> None:
    cache = make_cache()
    assert not cache.is_reserved(0, num_committed=0, num_rows=1)
    assert cache.reserve(0, num_committed=2, num_rows=3)
    asked = [(committed, rows) for committed in range(9) for rows in range(1, 8)]

    def reserved() -> set[tuple[int, int]]:
        return {(at, rows) for at, rows in asked if cache.is_reserved(0, num_committed=at, num_rows=rows)}

    assert reserved() == {(at, rows) for at, rows in asked if at >= 2 and at + rows <= 8}  # two pages of 4
    cache.publish(0, TEXT[:5], [5])
    assert reserved() == {(at, rows) for at, rows in asked if at >= 4 and at + rows <= 8}
    cache.release(0)
    assert not reserved()


def test_without_pages_nothing_is_taken() -> None:
    cache = make_cache(least=True)
    assert cache.has_room(0, 48)
    for committed in range(0, 40, 5):
        assert cache.reserve(0, num_committed=committed, num_rows=5)
    assert not cache.has_room(1, 9)
    assert cache.has_room(1, 8)
    assert cache.reserve(1, num_committed=0, num_rows=5)
    before = [list(pages.items()) for group in cache.groups for pages in group.pages]
    assert not cache.reserve(1, num_committed=5, num_rows=5)
    assert [list(pages.items()) for group in cache.groups for pages in group.pages] == before
    cache.assert_consistent()
    cache.release(0)
    assert cache.reserve(1, num_committed=5, num_rows=5)


def test_more_rows_than_a_ring_holds_are_refused() -> None:
    with pytest.raises(AssertionError, match="more than a ring has room for"):
        make_cache().reserve(0, num_committed=20, num_rows=20)


def test_a_hit_is_whole_pages_and_never_the_whole_prompt() -> None:
    cache = make_cache()
    fill(cache, 0, TEXT[:26], [26])
    for num_tokens, expected in [(1, 0), (4, 0), (5, 4), (24, 20), (25, 24), (26, 24), (40, 24)]:
        assert cache.match_prefix(TEXT[:num_tokens]) == expected
    assert cache.match_prefix([*TEXT[:13], 1, 1, 1, 1]) == 12
    assert cache.match_prefix([1, *TEXT[1:26]]) == 0  # the same page after another text is another page
    assert cache.match_prefix(TEXT[:26], salt=b"picture") == 0


def test_a_salt_keeps_texts_apart() -> None:
    cache = make_cache()
    assert cache.reserve(0, num_committed=0, num_rows=5)
    cache.publish(0, TEXT[:5], [5], salt=b"picture")
    assert cache.match_prefix(TEXT[:9]) == 0
    assert cache.match_prefix(TEXT[:9], salt=b"picture") == 4


def test_adopted_pages_are_the_same_pages_and_appending_takes_others() -> None:
    cache = make_cache()
    fill(cache, 0, TEXT[:22], [22])
    assert cache.match_prefix(TEXT[:22]) == 20
    cache.adopt(1, TEXT[:22], 20)
    cache.assert_consistent()
    full, window = cache.groups[1], cache.groups[0]
    assert [full.pages[1][page] for page in range(5)] == [full.pages[0][page] for page in range(5)]
    assert sorted(window.pages[1]) == [3, 4]  # positions 12 to 19
    assert cache.reserve(1, num_committed=20, num_rows=5)
    assert not {full.pages[1][5], full.pages[1][6]} & set(full.pages[0].values())
    cache.release(0)
    cache.assert_consistent()
    assert cache.match_prefix(TEXT[:22]) == 20


def test_a_write_into_a_published_page_is_refused() -> None:
    cache = make_cache()
    fill(cache, 0, TEXT[:10], [10])
    with pytest.raises(AssertionError, match="page that others may read"):
        cache.reserve(0, num_committed=7, num_rows=1)


def test_every_group_must_hold_what_the_next_row_sees() -> None:
    for which in range(4):
        cache = make_cache()
        fill(cache, 0, TEXT[:26], [26])
        cache.release(0)
        assert cache.match_prefix(TEXT[:26]) == 24
        cache.groups[which].pool.forget_all()
        assert cache.match_prefix(TEXT[:26]) == 0


def test_windows_are_kept_before_boundaries_and_nowhere_else() -> None:
    cache = make_cache(num_seats=1, context_length=2000)
    fill(cache, 0, TEXT[:1500], [600, 1500])
    expected = {4 * n for n in range(1, 376) if 600 - 264 < 4 * n <= 600 or 1500 - 264 < 4 * n <= 1500}
    found = {4 * (i + 1) for i, key in enumerate(cache.page_keys[0]) if cache.groups[0].pool.find(key) is not None}
    assert found == expected
    assert cache.match_prefix(TEXT[:1501]) == 1500
    assert cache.match_prefix([*TEXT[:1400], 1, 2]) == 1400
    assert cache.match_prefix([*TEXT[:1243], 1, 2]) == 600  # the window before 1240 is gone
    assert cache.match_prefix([*TEXT[:400], 1, 2]) == 400
    assert cache.match_prefix([*TEXT[:300], 1, 2]) == 0


def test_pages_are_kept_before_an_end_that_moves_and_not_where_it_was() -> None:
    cache = make_cache(num_seats=1, context_length=1000)
    fill(cache, 0, TEXT[:100], [100])
    for end in range(100, 1000, 4):  # an answer
        assert cache.reserve(0, num_committed=end, num_rows=4)
        cache.publish(0, TEXT[: end + 4], [100, end + 4])
        cache.assert_consistent()
    kept = {4 * (i + 1) for i, key in enumerate(cache.page_keys[0]) if cache.groups[0].pool.find(key) is not None}
    assert kept == {4 * n for n in range(1, 251) if 4 * n <= 100 or 4 * n > 1000 - 264}
    assert cache.match_prefix([*TEXT[:100], 1]) == 100
    assert cache.match_prefix([*TEXT[:900], 1]) == 900
    assert cache.match_prefix([*TEXT[:600], 1]) == 100
    assert sum(cache.groups[1].pool.find(key) is not None for key in cache.page_keys[0]) == 250


def test_what_is_withdrawn_is_found_no_more_whoever_holds_it() -> None:
    cache = make_cache()
    fill(cache, 0, TEXT[:22], [22])
    assert cache.match_prefix(TEXT[:22]) == 20
    cache.adopt(1, TEXT[:22], 20)
    fill(cache, 1, TEXT[:26], [26], start=20)
    cache.withdraw(1)
    cache.assert_consistent()
    assert cache.match_prefix(TEXT[:26]) == 0
    for seat in (0, 1):
        cache.release(seat)
    cache.assert_consistent()
    assert cache.num_cached_pages == 0


def test_the_end_of_a_prefix_is_given_up_before_its_beginning() -> None:
    cache = make_cache(least=True)
    fill(cache, 0, TEXT[:40], [40])
    cache.release(0)
    assert cache.match_prefix(TEXT[:41]) == 40
    fill(cache, 1, [1] * 10, [])  # two whole pages and a bit; two blank ones were left
    assert cache.match_prefix(TEXT[:41]) == 36
    cache.assert_consistent()


def test_prefixes_can_be_forgotten() -> None:
    cache = make_cache()
    fill(cache, 0, TEXT[:26], [26])
    cache.release(0)
    assert cache.num_cached_pages > 0
    cache.forget_prefixes()
    assert cache.num_cached_pages == 0
    assert cache.match_prefix(TEXT[:26]) == 0
    cache.assert_consistent()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_accounts_are_exact_in_any_order(data: st.DataObject) -> None:
    """Three seats over texts that share beginnings, in memory for little more than one."""
    max_cached_bytes = data.draw(st.sampled_from([None, 0]))
    cache = make_cache(num_seats=3, least=data.draw(st.booleans()), max_cached_bytes=max_cached_bytes)
    texts = [[*TEXT[:fork], *TEXT[100 * i : 100 * i + 48]][:48] for i, fork in enumerate((0, 13, 30, 30))]
    running: dict[int, tuple[list[int], int]] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        seat = data.draw(st.integers(0, 2))
        if seat not in running:
            text = data.draw(st.sampled_from(texts))
            start = cache.match_prefix(text)
            cache.adopt(seat, text, start)
            running[seat] = text, start
        elif (end := data.draw(st.integers(0, 9))) < 2:
            if end:
                cache.withdraw(seat)
            cache.release(seat)
            del running[seat]
        else:
            text, committed = running[seat]
            num_rows = min(data.draw(st.integers(1, ROWS)), len(text) - committed)
            if num_rows and cache.reserve(seat, num_committed=committed, num_rows=num_rows):
                committed += data.draw(st.integers(1, num_rows))
                running[seat] = text, committed
                if data.draw(st.booleans()):
                    cache.publish(seat, text[:committed], [20, committed])
        cache.assert_consistent()
    for seat in running:
        cache.release(seat)
    cache.assert_consistent()
    assert cache.num_free_pages == cache.num_pages
