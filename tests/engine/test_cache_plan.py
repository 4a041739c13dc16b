"""Pages out of a budget: nothing is allocated that was not planned, and what cannot work is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from outrider.engine.cache_plan import CachePlan, plan_pages, windows_of
from outrider.errors import ConfigError
from outrider.models.config import LayerKind, LayerSpec, RopeSpec

FULL = LayerSpec(kind=LayerKind.FULL, num_kv_heads=1, head_dim=24, window=None, rope=RopeSpec(theta=1e6))
SLIDING = replace(FULL, kind=LayerKind.SLIDING, num_kv_heads=2, head_dim=8, window=40)
TARGET = (SLIDING, FULL, SLIDING, replace(FULL, num_kv_heads=3, head_dim=4), replace(FULL, cache_source=1))
DRAFTER = (replace(FULL, head_dim=5),)
FULL_PAGE, WINDOW_PAGE, DRAFTER_PAGE = 16 * 2 * (24 + 12) * 4, 16 * 2 * 2 * 16 * 4, 16 * 2 * 5 * 4


def plan(**settings: Any) -> CachePlan:
    """Three seats of 1000 tokens, passes of 9 rows, float32."""
    sizes = {"num_seats": 3, "context_length": 1000, "max_rows": 9, "dtype": torch.float32}
    return plan_pages(TARGET, DRAFTER, **{**sizes, **settings})


def test_layers_of_one_window_are_a_group_and_borrowed_caches_count_for_nothing() -> None:
    groups = plan().groups
    assert windows_of(TARGET) == [40, None]
    assert [(group.owner, group.window) for group in groups] == [("target", 40), ("target", None), ("drafter", None)]
    assert [group.page_bytes for group in groups] == [WINDOW_PAGE, FULL_PAGE, DRAFTER_PAGE]
    assert [group.width for group in groups] == [5, 63, 63]  # 49 positions touch at most 5 pages of 16
    # every seat's ring and two kept windows of 40 + 256 tokens each; every seat's context
    assert [group.num_pages for group in groups] == [3 * 5 + 2 * 3 * 19, 3 * 63, 3 * 63]


def test_a_window_as_long_as_the_context_keeps_no_more_than_that() -> None:
    assert [group.width for group in plan(context_length=64).groups] == [4, 4, 4]


def test_a_budget_is_kept_and_used() -> None:
    least = 15 * WINDOW_PAGE + 63 * (FULL_PAGE + DRAFTER_PAGE)
    smallest = plan(budget_bytes=least)
    assert smallest.num_bytes == least
    assert [group.num_pages for group in smallest.groups] == [15, 63, 63]
    plans = [plan(budget_bytes=budget) for budget in range(least, 5 * least, least // 3)]
    for budget, found in zip(range(least, 5 * least, least // 3), plans, strict=True):
        assert budget - WINDOW_PAGE - FULL_PAGE - DRAFTER_PAGE < found.num_bytes <= budget
    for small, large in pairwise(plans):
        assert all(a.num_pages <= b.num_pages for a, b in zip(small.groups, large.groups, strict=True))


def test_what_one_request_does_not_fit_in_is_refused_and_the_setting_named() -> None:
    with pytest.raises(ConfigError, match=r"context_length=1000 with max_seats=3 needs 0\.[0-9] MiB.*Lower"):
        plan(budget_bytes=15 * WINDOW_PAGE + 63 * (FULL_PAGE + DRAFTER_PAGE) - 1)


def test_what_is_kept_for_later_prompts_has_a_budget_of_its_own() -> None:
    assert all(group.max_cached_pages == group.num_pages for group in plan().groups)
    assert all(group.max_cached_pages == 0 for group in plan(max_cached_bytes=0).groups)
    half = plan(max_cached_bytes=plan().num_bytes // 2)
    kept = sum(group.max_cached_pages * group.page_bytes for group in half.groups)
    assert 0.4 * half.num_bytes < kept <= half.num_bytes // 2


def test_it_can_be_printed() -> None:
    lines = plan().describe()
    assert lines[0].startswith("target, window 40: 129 pages of 16 tokens, 0.5 MiB; up to 0.5 MiB kept")
    assert lines[1].startswith("target, full attention: 189 pages")
    assert lines[-1].startswith("caches of 3 requests at a time: ")


def test_only_one_request_at_a_time_has_a_prompts_rows() -> None:
    wide, narrow = plan(max_rows=200), plan(max_rows=200, max_block_rows=9)
    assert [group.width for group in narrow.groups] == [group.width for group in wide.groups] == [16, 63, 63]
    assert wide.groups[0].num_pages - narrow.groups[0].num_pages == 2 * (16 - 5)
    least = (16 + 2 * 5) * WINDOW_PAGE + 63 * (FULL_PAGE + DRAFTER_PAGE)
    assert plan(max_rows=200, max_block_rows=9, budget_bytes=least).num_bytes == least
    with pytest.raises(ConfigError):
        plan(max_rows=200, max_block_rows=9, budget_bytes=least - 1)
