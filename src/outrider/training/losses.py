"""What a drafter is asked to minimise, and what it would be worth in a cycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class BlockLoss:
    """Loss of one step and the acceptance it implies."""

    loss: Tensor  # scalar
    acceptance_by_slot: Tensor  # [K']: mean chance that slot k is accepted, given that those before it were


def position_weights(num_slots: int, *, decay: float, device: torch.device | str = "cpu") -> Tensor:
    """exp(-(k - 1) / decay) for slots k = 1 .. K' (arXiv 2602.06036, eq. 4), float32 [K']."""
    return torch.exp(-torch.arange(num_slots, device=device, dtype=torch.float32) / decay)


class _GatheredLogSoftmax(torch.autograd.Function):
    """log softmax at a few ids without a float32 copy of the logits, which are most of a step's memory traffic."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        """logits [B, Vd], ids int64 [B, C] -> float32 [B, C]."""
        norm = torch.cat([torch.logsumexp(rows.float(), dim=-1) for rows in torch.split(logits, ROWS_AT_A_TIME)])
        ctx.save_for_backward(logits, ids, norm)
        return logits.gather(-1, ids).float() - norm[:, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """d/d logits: grad at the ids, less softmax times the sum of grad."""
        logits, ids, norm = ctx.saved_tensors
        result = torch.empty_like(logits)
        total = grad.sum(dim=-1)
        for start in range(0, len(logits), ROWS_AT_A_TIME):
            rows = slice(start, start + ROWS_AT_A_TIME)
            probs = torch.exp(logits[rows].float() - norm[rows, None])
            result[rows] = (-probs * total[rows, None]).scatter_add_(1, ids[rows], grad[rows]).to(logits.dtype)
        return result, None


def candidate_log_probs(logits: Tensor, draft_ids: Tensor) -> Tensor:
    """log softmax of logits [..., Vd] at draft ids [..., C]; -inf where an id is -1 (not in the draft vocabulary)."""
    ids = draft_ids.clamp_min(0)
    chosen: Tensor = _GatheredLogSoftmax.apply(logits.flatten(0, -2), ids.flatten(0, -2))  # type: ignore[no-untyped-call]
    return torch.where(draft_ids >= 0, chosen.view(draft_ids.shape), -torch.inf)


def block_loss(
    logits: Tensor,
    draft_ids: Tensor,
    target_probs: Tensor,
    mask: Tensor,
    *,
    decay: float,
    cross_entropy_weight: float,
    total_variation_weight: float,
    distillation: Tensor | None = None,
) -> BlockLoss:
    """Cross-entropy and total variation against the target's likeliest candidates.

    logits [B, K', Vd], draft_ids int64 [B, K', C] (-1: outside the draft vocabulary), target_probs [B, K', C],
    mask bool [B, K']. 1 - total variation is the acceptance probability of rejection sampling; for a point mass (greedy
    text) it is the probability of the label. `distillation` [B, K'] is added as it is. Averages are over the summed
    weights of supervised slots.
    """
    log_probs = candidate_log_probs(logits, draft_ids)
    known = draft_ids >= 0
    overlap = torch.minimum(log_probs.exp(), target_probs).sum(dim=-1)  # [B, K']
    cross_entropy = -(target_probs * torch.where(known, log_probs, 0.0)).sum(dim=-1)
    per_slot = cross_entropy_weight * cross_entropy + total_variation_weight * (1.0 - overlap)
    if distillation is not None:
        per_slot = per_slot + distillation
    weights = mask * position_weights(mask.shape[-1], decay=decay, device=mask.device)
    loss = (per_slot * weights).sum() / weights.sum().clamp_min(1.0)
    accepted = (overlap.detach() * mask).sum(dim=0) / mask.sum(dim=0).clamp_min(1)
    return BlockLoss(loss, accepted)
