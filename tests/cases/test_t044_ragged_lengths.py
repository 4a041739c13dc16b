"""T-044: in a batch on shared pages every request writes the text it writes alone, and accepts what it accepts alone.

The engine's own batches are in test_t008 and test_engine.
Seen red: attention through the first seat's page table for all; a window that drops a page too early.
"""

from __future__ import annotations

import random

import pytest

from tests.cases.paged import PagedModels, PagedRequest
from tests.toy import reference_greedy

LENGTHS, NUM_DRAFTS, NUM_ROUNDS = (3, 8, 9, 17, 1), 4, 6
PROMPTS = [[(13 * i * i + 29 * i + 7 * length) % 96 for i in range(length)] for length in LENGTHS]
JOINS, LEAVES = {4: 3}, {1: 2}  # request 4 joins in round 3, request 1 leaves after round 2


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    target = PagedModels(num_seats=1).target
    count = NUM_ROUNDS * (NUM_DRAFTS + 1) + NUM_DRAFTS + 1
    return [[*prompt, *reference_greedy(target, prompt, count)] for prompt in PROMPTS]


def scripted(request: PagedRequest, text: list[int], num_right: int) -> list[int]:
    coming = text[len(request.token_ids) :][:NUM_DRAFTS]
    return [*coming[:num_right], *[(token + 1) % 96 for token in coming[num_right:]]]


@pytest.mark.parametrize("seed", range(6))
def test_t044_a_batch_is_five_requests_alone(seed: int, texts: list[list[int]]) -> None:
    """What a request does alone is known: its text is F4's and it accepts as many drafts as were right."""
    chance = random.Random(seed)
    models = PagedModels(num_seats=5)
    requests = {index: models.start(index, PROMPTS[index]) for index in range(5) if index not in JOINS}
    scripts: dict[int, list[int]] = {index: [] for index in range(5)}
    for round_number in range(1, NUM_ROUNDS + 1):
        for index, when in JOINS.items():
            if when == round_number:
                requests[index] = models.start(index, PROMPTS[index])
        running = list(requests.items())
        chance.shuffle(running)
        for index, _ in running:
            scripts[index].append(chance.randrange(NUM_DRAFTS + 1))
        drafts = [scripted(request, texts[index], scripts[index][-1]) for index, request in running]
        models.cycle([request for _, request in running], drafts)
        for index, request in running:
            assert request.token_ids == texts[index][: len(request.token_ids)]
            assert request.num_committed == LENGTHS[index] + sum(scripts[index]) + len(scripts[index])
            assert request.accepted == scripts[index]
        for index, when in LEAVES.items():
            if when == round_number:
                models.finish(requests.pop(index))
    models.kv_cache.assert_consistent()
