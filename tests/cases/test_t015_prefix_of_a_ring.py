"""T-015: of a text that is known only what windows still hold is reused, and the answer is that of a cold run.

Seen red: a match that asks the full groups only; adopting a window's pages from the first on; publishing a page before
its last rows are committed.
"""

from __future__ import annotations

import functools

import pytest
import torch

from outrider.engine import kv_cache
from tests.cases.paged import PagedModels, PagedRequest
from tests.toy import WINDOW, reference_greedy, toy_target

PROMPT, NUM_TOKENS, NUM_MORE = [(11 * i * i + 5 * i + 3) % 96 for i in range(20)], 10, 12
SHARED = (25, 18, 12, 6)


@functools.cache
def wanted(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return reference_greedy(toy_target(), prompt, num_tokens)


def decode(models: PagedModels, request: PagedRequest, num_tokens: int, *, has_drafts: bool) -> list[int]:
    """The answer's tokens; drafts are the drafter's, all but one of them usually wrong."""
    length = len(request.token_ids) - 1 + num_tokens
    while len(request.token_ids) < length:
        drafts = models.draft_logits(request).argmax(dim=-1).tolist() if has_drafts else []
        models.cycle([request], [drafts])
    return request.token_ids[length - num_tokens : length]


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize(("slack", "hits"), [(256, (24, 16, 12, 4)), (0, (24, 0, 0, 0))], ids=["kept", "window only"])
def test_t015_a_hit_answers_as_a_cold_run(
    slack: int, hits: tuple[int, ...], has_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without slack, windows are kept before 20 and 29 tokens only: nothing shorter than 20 can be restored."""
    monkeypatch.setattr(kv_cache, "WINDOW_SLACK_TOKENS", slack)
    for num_shared, hit in zip(SHARED, hits, strict=True):
        models, cold = PagedModels(drafter_window=WINDOW), PagedModels(drafter_window=WINDOW)
        first = models.start(0, PROMPT)
        decode(models, first, NUM_TOKENS, has_drafts=has_drafts)
        turn = first.token_ids[:30]
        assert turn == PROMPT + wanted(tuple(PROMPT), NUM_TOKENS)
        models.finish(first)

        prompt = [*turn[:num_shared], 90, 91, 92]
        second, expected = models.start(1, prompt), cold.start(0, prompt)
        assert second.num_cached_tokens == hit
        assert expected.num_cached_tokens == 0
        torch.testing.assert_close(models.draft_logits(second), cold.draft_logits(expected), rtol=0, atol=1e-10)
        found = decode(models, second, NUM_MORE, has_drafts=has_drafts)
        assert found == wanted(tuple(prompt), NUM_MORE)
        models.finish(second)
