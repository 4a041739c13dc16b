"""The walk over the slots of a block, left to right: what is walked, what comes of it, and the plain twin."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.kernels.sampler import Sampler, Sampling


class Candidates(NamedTuple):
    """What one slot may draft."""

    ids: Tensor  # target ids, int64 [Q, C]
    logits: Tensor  # [Q, C], best first
    confidence: Tensor | None  # [Q]


class MarkovTensors(NamedTuple):
    """A Markov head of rank r (formats.md §3.1) for a walk: rows of its matrices, in the format that is computed in."""

    anchors: Tensor  # [Q, r]: w1's rows
    embeddings: Tensor  # [Q, K, C, r]: w1's rows of candidates
    w2: Tensor  # [Q, K, C, r]
    joint: Tensor | None  # columns of gate_proj for w1's row [r, r], of joint_proj for state and w1's row [3r, 2r]
    joint_parts: Tensor | None  # [Q, K, r] or [Q, K, 3r]: what bias and hidden states add to that


class WalkTensors(NamedTuple):
    """A walk as tensors: Q requests, K slots, C candidates each, best first."""

    logits: Tensor  # [Q, K, C], before any head
    token_ids: Tensor  # int64 [Q, K, C]: target ids
    markov: MarkovTensors | None
    confidence: Tensor | None  # [r]: what a confidence head takes of the row of w1
    confidence_parts: Tensor | None  # [Q, K]: what bias and hidden states add to it, if there is such a head


class SlotWalk(Protocol):
    """A block whose slots stand ready; it is walked once, either way."""

    num_drafts: int

    def step(self, previous_token_ids: Tensor) -> Candidates:
        """The candidates of the next slot after target ids int64 [Q], the anchors at first."""
        ...

    def tensors(self, anchor_token_ids: Tensor) -> WalkTensors:
        """All slots at once, for a kernel."""
        ...


class WalkStarts(NamedTuple):
    """The anchors of Q requests, int64 [Q] each."""

    token_ids: Tensor
    seats: Tensor  # -1: a spare request
    positions: Tensor


class Walked(NamedTuple):
    """Drafts of Q requests."""

    token_ids: Tensor  # int64 [Q, K]
    candidate_ids: Tensor | None  # int64 [Q, K, C], in any order; None where the best was taken everywhere
    candidate_probs: Tensor | None  # [Q, K, C]: what was drawn from
    confidences: Tensor | None  # [Q, K], of a drafter that has such a head


def walk_stepwise(slots: SlotWalk, starts: WalkStarts, sampling: Sampling | None, sampler: Sampler) -> Walked:
    """`Kernels.walk`, a slot after the other."""
    drafts, drawn, chances = [starts.token_ids], [], []
    for slot in range(slots.num_drafts):
        ids, logits, chance = slots.step(drafts[-1])
        if sampling is None:
            drafts.append(ids[:, 0])
        else:
            token_ids, probs = sampler.draw(ids, logits, sampling, starts.positions, slot)
            drafts.append(token_ids)
            drawn.append((ids, probs))
        chances.append(chance)
    walked = Walked(torch.stack(drafts[1:], dim=1), None, None, stacked(chances))
    if not drawn:
        return walked
    candidate_ids, candidate_probs = (torch.stack(parts, dim=1) for parts in zip(*drawn, strict=True))
    return walked._replace(candidate_ids=candidate_ids, candidate_probs=candidate_probs)


def stacked(chances: list[Tensor | None]) -> Tensor | None:
    """Chances [Q] of every slot, [Q, K]; None without a confidence head."""
    known = [chance for chance in chances if chance is not None]
    return torch.stack(known, dim=1) if known else None
