"""How many drafts of each request a cycle verifies. The one place that decides it."""

from __future__ import annotations

from collections.abc import Sequence


def plan_draft_lengths(limits: Sequence[int], *, row_budget: int) -> list[int]:
    """Draft length of each running request, from the most that it may use itself.

    Every request has an anchor row; the rows that `row_budget` leaves are shared out evenly, so that a request's drafts
    depend on how many others run but never on what was drawn for them.
    """
    if not limits:
        return []
    share = max(0, row_budget // len(limits) - 1)
    return [min(limit, share) for limit in limits]
