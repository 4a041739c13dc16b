"""T-019: a cycle reserves k + 1 rows, and never writes into a page that another request owns or may read.

Seen red: reserve() asking for one row less; a pool that hands a page out twice.
"""

from __future__ import annotations

import hashlib

import pytest

from tests.cases.paged import PAGE_SIZE, PagedModels, PagedRequest
from tests.toy import reference_greedy

PREFIX, NUM_DRAFTS, NUM_TOKENS = [5, 17, 80, 3], 3, 14


def owned_pages(models: PagedModels, seat: int) -> dict[tuple[int, int], str]:
    """A hash of every page a seat holds, over all layers of its group."""
    found = {}
    layers = (*models.kv_cache.target_caches, *models.kv_cache.drafter_caches)
    for index, group in enumerate(models.kv_cache.groups):
        for page in group.pages[seat].values():
            stored = [each[page] for layer in layers if layer.table is group.table for each in layer[:2]]
            found[index, page] = hashlib.sha256(b"".join(each.numpy().tobytes() for each in stored)).hexdigest()
    return found


def scripted_drafts(request: PagedRequest, text: list[int], num_right: int) -> list[int]:
    """Three drafts, the first few of them right."""
    drafts = text[len(request.token_ids) :][:NUM_DRAFTS]
    return [token if i < num_right else (token + 1) % 96 for i, token in enumerate(drafts)]


@pytest.mark.parametrize("length", range(4, 9))
def test_t019_blocks_stay_in_their_own_pages(length: int) -> None:
    models = PagedModels()
    prompts = [[*PREFIX, *[7, 11, 13, 19][: length - 4]], [*PREFIX, 44, 9]]
    texts = [[*prompt, *reference_greedy(models.target, prompt, NUM_TOKENS + NUM_DRAFTS)] for prompt in prompts]
    requests = [models.start(seat, prompt) for seat, prompt in enumerate(prompts)]
    assert [request.num_cached_tokens for request in requests] == [0, PAGE_SIZE]
    ends = set()
    for round_index in range(10):
        request, other = requests[round_index % 2], requests[1 - round_index % 2]
        text = texts[round_index % 2]
        before = owned_pages(models, other.seat)
        ends.add((request.num_committed + NUM_DRAFTS) % PAGE_SIZE)
        models.cycle([request], [scripted_drafts(request, text, num_right=round_index // 2 % 4)])
        assert owned_pages(models, other.seat) == before
        models.kv_cache.assert_consistent()
        assert request.token_ids == text[: len(request.token_ids)]
    assert ends == {0, 1, 2, 3}  # on, before and after a border
    assert models.kernels.num_checked > 0
