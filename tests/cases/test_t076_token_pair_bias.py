"""T-076: a slot's bias is by the token drafted before it, and the accept test sees the corrected probabilities.

Seen red: the bias by the backbone's argmax, by the slot's own token, and base probabilities handed on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.proposer import walked, walked_by_tensors
from outrider.engine.rejection import DraftBlock, accept_by_rejection
from outrider.engine.sampling import draw
from outrider.kernels.reference import TorchKernels
from outrider.models.drafter_config import MarkovKind
from outrider.models.dspark import BlockWalk, MarkovHead
from tests.statistics import assert_chi_square, sequence_probs

BASE = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
PAIRS = torch.zeros(5, 5, dtype=torch.float64)  # bias of a token, by the one before it
for before in range(4):
    PAIRS[before, before + 1] = 5.0
SAMPLED = SamplingParams(temperature=1.0)
KERNELS = TorchKernels(torch.float64)


def walk(num_requests: int, pairs: Tensor | None, num_drafts: int = 3) -> BlockWalk:
    head = None
    if pairs is not None:
        one_hot = torch.eye(5, dtype=torch.float64)
        head = MarkovHead(MarkovKind.VANILLA, KERNELS, one_hot, pairs.T.contiguous(), None, None)
    logits = BASE.expand(num_requests, num_drafts, 5)
    hidden = torch.zeros(num_requests, num_drafts, 1, dtype=torch.float64)
    return BlockWalk(hidden, logits, num_candidates=5, draft_to_target=None, markov=head, confidence=None)


def batch(num_requests: int, params: SamplingParams, num_drafts: int = 3) -> CycleBatch:
    positions = tuple(range(num_requests))
    return CycleBatch(
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


def sampled(num_requests: int, num_drafts: int) -> DraftBlock:
    return walked(batch(num_requests, SAMPLED, num_drafts), walk(num_requests, PAIRS, num_drafts))


def test_t076_greedy_drafts_follow_the_pairs() -> None:
    assert walked_by_tensors(batch(2, SamplingParams()), walk(2, PAIRS), KERNELS).token_ids.tolist() == [[1, 2, 3]] * 2
    assert walked(batch(2, SamplingParams()), walk(2, PAIRS)).token_ids.tolist() == [[1, 2, 3]] * 2


def test_t076_without_a_head_it_is_plain_block_drafting() -> None:
    assert walked_by_tensors(batch(1, SamplingParams()), walk(1, None), KERNELS).token_ids.tolist() == [[0, 0, 0]]
    draft = walked(batch(1, SAMPLED), walk(1, None))
    in_order = torch.zeros(3, 5, dtype=torch.float64).scatter(1, draft.candidate_ids[0], draft.candidate_probs[0])
    torch.testing.assert_close(in_order, BASE.softmax(-1).expand(3, 5))


def test_t076_sampled_drafts_are_the_chains() -> None:
    chain = sequence_probs(BASE + PAIRS, 0, 2)
    draft = sampled(4000, 2)
    rare = {pair for pair, chance in chain.items() if chance * 4000 < 5}
    drawn = [tuple(pair) for pair in draft.token_ids.tolist()]
    pooled = {pair: chance for pair, chance in chain.items() if pair not in rare}
    pooled["rare"] = sum(chain[pair] for pair in rare)
    assert_chi_square(["rare" if pair in rare else pair for pair in drawn], pooled)


def test_t076_the_accept_test_gets_the_corrected_probabilities() -> None:
    """The text is the target's whatever was drafted: base probabilities in place of these would show."""
    num_requests, target = 4000, torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1], dtype=torch.float64)
    draft = sampled(num_requests, 2)
    uniform = torch.rand(num_requests, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows = target.expand(num_requests, 3, 5)
    num_accepted, left = accept_by_rejection(draft, rows, torch.full((num_requests,), 2), uniform[:, :2])
    added = draw(left, uniform[:, 2])
    tokens: list[int] = []
    for slot in range(2):
        tokens += torch.where(num_accepted > slot, draft.token_ids[:, slot], added)[num_accepted >= slot].tolist()
    assert_chi_square(tokens, dict(enumerate(target.tolist())))
    assert num_accepted.sum() > 1000
