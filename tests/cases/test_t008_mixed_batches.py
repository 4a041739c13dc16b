"""T-008: greedy and sampled requests of one batch do not disturb each other, in any order and with any draft counts.

Penalties are not offered, so the third request is greedy with one draft and no penalty.
Seen red: reject_or_keep taking the params of the next request of the batch.
"""

from __future__ import annotations

from itertools import permutations

import torch

from outrider.core import SamplingParams
from tests.scripted import FixedProposer, TableTarget, make_test_engine, run_requests
from tests.statistics import assert_frequencies

# Token 0 and 1 tie after themselves; 3 leads to 4 and 4 to 3; 2 leads to 0, 1 or 2 as the sampled request likes.
TIE, LOW = [1.0, 1.0, 0.0, -9.0, -9.0], -9.0
TABLE = torch.tensor([TIE, TIE, TIE, [LOW, LOW, LOW, LOW, 1.0], [LOW, LOW, LOW, 1.0, LOW]])
GREEDY = ([0], SamplingParams(max_tokens=40, num_speculative_tokens=2))
SAMPLED = ([2], SamplingParams(temperature=1.0, max_tokens=40, num_speculative_tokens=4))
OTHER = ([3], SamplingParams(max_tokens=40, num_speculative_tokens=1))


def run(*requests: tuple[list[int], SamplingParams]) -> list[list[int]]:
    draws = FixedProposer(torch.full((5,), 0.2, dtype=torch.float64))
    return run_requests(make_test_engine(TableTarget(TABLE), draws), *requests)


def test_t008_every_order_gives_the_same_greedy_text_and_the_same_distribution() -> None:
    (greedy,), (other,) = run(GREEDY), run(OTHER)
    assert greedy == [0] * 40
    assert other == [4, 3] * 20
    sampled = run(SAMPLED)[0]
    for order in permutations((GREEDY, SAMPLED, OTHER)):
        texts = run(*order)
        assert texts[order.index(GREEDY)] == greedy
        assert texts[order.index(OTHER)] == other
        sampled += texts[order.index(SAMPLED)]
    assert_frequencies(sampled, torch.tensor(TIE).softmax(dim=0).tolist())
