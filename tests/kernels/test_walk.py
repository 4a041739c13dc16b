"""The plain walk: each slot after the draft before it, drawn with the noise of its own slot.

Seen red: the anchor before every slot; the noise of slot 0 in every slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.kernels.sampler import TorchSampler
from outrider.kernels.walk import Candidates, WalkStarts, WalkTensors, walk_stepwise
from tests.kernels.sampled_rows import sampling

ANCHORS, POSITIONS = torch.tensor([4, 6]), torch.tensor([10, 20])
STARTS = WalkStarts(ANCHORS, torch.arange(2), POSITIONS)
PARAMS = [SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=1.0)]


class Counting:
    """Four candidates, the numbers after the token before; all alike, but for the first."""

    num_drafts = 12

    def step(self, previous_token_ids: Tensor) -> Candidates:
        logits = torch.tensor([[0.1, 0.0, 0.0, 0.0]]).expand(len(previous_token_ids), -1)
        return Candidates(previous_token_ids[:, None] + torch.arange(1, 5), logits, previous_token_ids / 100)

    def tensors(self, anchor_token_ids: Tensor) -> WalkTensors:
        raise AssertionError("not asked for slot by slot")


def test_the_best_follows_the_draft_before() -> None:
    walked = walk_stepwise(Counting(), STARTS, None, TorchSampler())
    slots = torch.arange(Counting.num_drafts)
    assert torch.equal(walked.token_ids, ANCHORS[:, None] + 1 + slots)
    torch.testing.assert_close(walked.confidences, (ANCHORS[:, None] + slots) / 100)
    assert walked.candidate_ids is walked.candidate_probs is None


def test_draws_follow_the_draft_before_with_noise_of_their_own() -> None:
    sampler, asked = TorchSampler(), sampling(PARAMS)
    walked = walk_stepwise(Counting(), STARTS, asked, sampler)
    assert walked.candidate_ids is not None
    before = torch.cat([ANCHORS[:, None], walked.token_ids[:, :-1]], dim=1)
    assert torch.equal(walked.candidate_ids, before[..., None] + torch.arange(1, 5))
    for slot in range(Counting.num_drafts):
        ids, logits, _ = Counting().step(before[:, slot])
        drafts, probs = sampler.draw(ids, logits, asked, POSITIONS, slot)
        assert torch.equal(walked.token_ids[:, slot], drafts)
        assert walked.candidate_probs is not None
        assert torch.equal(walked.candidate_probs[:, slot], probs)
