"""T-004: the distribution that drafts are drawn from, filters included, is the one they are judged by.

Fewer draws than the case asks for, both positions pooled: each is a request of its own.
Seen red: the walk storing logits.softmax(-1), without the request's filters, for the accept test.
"""

from __future__ import annotations

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.proposer import walked
from outrider.engine.rejection import DraftBlock, accept_by_rejection
from outrider.engine.sampling import draw, filtered_probs
from outrider.models.dspark import BlockWalk
from tests.statistics import assert_frequencies

TARGET, DRAFTER = (torch.tensor(p, dtype=torch.float64) for p in ((0.50, 0.30, 0.15, 0.05), (0.40, 0.30, 0.20, 0.10)))
RIGHT = (0.625, 0.375, 0.0, 0.0)
TOP_2 = SamplingParams(temperature=1.0, top_k=2)


def propose(params: SamplingParams, *, num_requests: int, num_drafts: int) -> DraftBlock:
    """Drafts of a drafter whose softmax is DRAFTER in every slot."""
    walk = BlockWalk(
        torch.zeros(num_requests, num_drafts, 1),
        DRAFTER.log().expand(num_requests, num_drafts, 4),
        num_candidates=4,
        draft_to_target=None,
        markov=None,
        confidence=None,
    )
    positions = tuple(range(num_requests))
    batch = CycleBatch(
        seats=torch.zeros(num_requests, dtype=torch.int64),
        anchor_token_ids=torch.zeros(num_requests, dtype=torch.int64),
        anchor_positions=torch.arange(num_requests),
        draft_lengths=torch.full((num_requests,), num_drafts),
        host_positions=positions,
        host_lengths=(num_drafts,) * num_requests,
        params=(params,) * num_requests,
        noise_seeds=positions,
        adjustments=(None,) * num_requests,
        outputs=((),) * num_requests,
    )
    return walked(batch, walk)


def test_t004_filters_reach_draft_and_accept_test_alike() -> None:
    num_requests = 1200
    draft = propose(TOP_2, num_requests=num_requests, num_drafts=2)
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(num_requests, 3, generator=generator, dtype=torch.float64)
    rows = filtered_probs(TARGET.log(), TOP_2).expand(num_requests, 3, 4)
    num_accepted, left = accept_by_rejection(draft, rows, torch.full((num_requests,), 2), uniform[:, :2])
    added = draw(left, uniform[:, 2])
    tokens = []
    for slot in range(2):
        tokens += torch.where(num_accepted > slot, draft.token_ids[:, slot], added)[num_accepted >= slot].tolist()
    assert_frequencies(tokens, RIGHT)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.65}, {"min_p": 0.5}, {"temperature": 0.3}])
def test_t004_a_proposal_sums_to_one_over_what_can_be_drafted(filters: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **filters})  # type: ignore[arg-type]
    draft = propose(params, num_requests=30, num_drafts=2)
    torch.testing.assert_close(draft.candidate_probs.sum(-1), torch.ones(30, 2, dtype=torch.float64))
    chance = (draft.candidate_probs * (draft.candidate_ids == draft.token_ids[..., None])).sum(-1)
    assert (chance > 0).all()
