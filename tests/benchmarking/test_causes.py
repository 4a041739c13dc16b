from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.benchmarking.causes import Work, cause_of

FAST = Work(
    kind="code",
    num_tokens=101,
    ttft_s=0.1,
    e2e_s=1.1,
    server_s=1.09,
    num_drafts=25,
    num_draft_tokens=175,
    num_accepted_tokens=75,
)
LONG = replace(FAST, kind="long", ttft_s=5.0, e2e_s=6.0, server_s=5.99)


def slowed(seconds: float, **counts: int | None) -> Work:
    return replace(FAST, e2e_s=FAST.e2e_s + seconds, server_s=1.09 + seconds, **counts)


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        (slowed(3, num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0), "drafting off"),
        (slowed(3, num_drafts=100, num_draft_tokens=0, num_accepted_tokens=0), "drafting off"),  # cycles that drafted 0
        (slowed(3, num_drafts=95, num_draft_tokens=665, num_accepted_tokens=5), "acceptance collapsed"),
        (slowed(3), "steps slow"),
        (slowed(3, num_drafts=30, num_draft_tokens=210, num_accepted_tokens=70), "steps slow"),  # length 3.3 of 4
        (replace(slowed(3), ttft_s=3.1), "prefill"),
        (replace(slowed(3), server_s=1.09), "client"),
        (slowed(3, num_drafts=None, num_draft_tokens=None, num_accepted_tokens=None), "unknown"),
    ],
)
def test_each_cause_is_told_from_the_others(slow: Work, cause: str) -> None:
    assert cause_of([slow], [FAST, LONG, FAST]) == cause


def test_a_long_prompt_is_compared_with_long_prompts() -> None:
    slow = replace(LONG, e2e_s=9.0, server_s=8.99)
    assert cause_of([slow], [FAST, FAST, LONG]) == "steps slow"
    assert cause_of([replace(slow, ttft_s=8.0)], [FAST, FAST, LONG]) == "prefill"


def test_more_tokens_are_no_cause() -> None:
    longer = replace(FAST, num_tokens=401, e2e_s=4.1 + 0.5, server_s=1.09 + 3, num_drafts=100, num_draft_tokens=700)
    assert cause_of([longer], [FAST]) == "client"


def test_a_server_without_a_drafter_has_slow_steps() -> None:
    plain = replace(FAST, num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)
    assert cause_of([replace(plain, e2e_s=4.1, server_s=4.09)], [plain]) == "steps slow"
