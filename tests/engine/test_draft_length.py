"""Rows of a cycle stay within the budget; nobody drafts more than it may, and no anchor is without a row."""

from __future__ import annotations

import pytest

from outrider.engine.draft_length import plan_draft_lengths


@pytest.mark.parametrize(
    ("limits", "row_budget", "expected"),
    [
        ([], 8, []),
        ([7], 64, [7]),
        ([7], 4, [3]),
        ([15, 15, 3, 0], 64, [15, 15, 3, 0]),
        ([15, 15, 3, 0], 20, [4, 4, 3, 0]),
        ([4] * 16, 64, [3] * 16),
        ([4] * 16, 16, [0] * 16),
        ([4] * 3, 8, [1] * 3),
        ([4] * 3, 2, [0] * 3),  # an anchor always has its row
    ],
)
def test_rows_are_shared_out(limits: list[int], row_budget: int, expected: list[int]) -> None:
    lengths = plan_draft_lengths(limits, row_budget=row_budget)
    assert lengths == expected
    assert sum(length + 1 for length in lengths) <= max(row_budget, len(limits))
