"""What a drafter is asked to minimise, and what it would be worth in a cycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.training.config import OptimizeConfig

ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class BlockLoss:
    """Loss of a step, or of a part of it (then its share), and the acceptance it implies."""

    loss: Tensor  # scalar
    accepted: Tensor  # float32 [K']: chances that slot k is accepted, given that those before it were, summed
    counted: Tensor  # float32 [K']: over so many blocks

    @property
    def acceptance_by_slot(self) -> Tensor:
        """Mean chances, [K']."""
        return self.accepted / self.counted.clamp_min(1)

    def __add__(self, other: BlockLoss) -> BlockLoss:
        """Of both parts of a step."""
        return BlockLoss(self.loss + other.loss, self.accepted + other.accepted, self.counted + other.counted)


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


def row_losses(
    logits: Tensor, draft_ids: Tensor, target_probs: Tensor, teacher_logits: Tensor | None, options: OptimizeConfig
) -> tuple[Tensor, Tensor]:
    """What each row of logits costs, and the chance that its draft is accepted; both float32 [R].

    logits [R, Vd], draft_ids int64 [R, C] (-1: outside the draft vocabulary), target_probs [R, C] of the target's
    likeliest candidates, teacher_logits [R, Vd] of the target itself. 1 - total variation is the acceptance probability
    of rejection sampling; for a point mass (greedy text) it is the probability of the label. With the L1 of
    probabilities the chance is 1 - L1 / 2 over the whole draft vocabulary (formats.md §3.2).
    """
    log_probs = candidate_log_probs(logits, draft_ids)
    overlap = torch.minimum(log_probs.exp(), target_probs).sum(dim=-1)
    cross_entropy = -(target_probs * torch.where(draft_ids >= 0, log_probs, 0.0)).sum(dim=-1)
    loss = options.cross_entropy_weight * cross_entropy + options.total_variation_weight * (1.0 - overlap)
    if teacher_logits is None:
        return loss, overlap.detach()
    taught = teacher_logits.float().softmax(dim=-1)
    if options.distillation_weight > 0:
        entropy = functional.cross_entropy(logits.float(), taught, reduction="none")
        loss = loss + options.distillation_weight * entropy
    if options.probability_l1_weight == 0:
        return loss, overlap.detach()
    distance = (logits.float().softmax(dim=-1) - taught).abs().sum(dim=-1)
    return loss + options.probability_l1_weight * distance, (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)


def hidden_losses(hidden: Tensor, teacher: Tensor) -> Tensor:
    """Mean absolute difference of normed hidden states [.., N] from the target's that give the same token, [..]."""
    return (hidden.float() - teacher.float()).abs().mean(dim=-1)


def confidence_losses(confidence_logits: Tensor, chances: Tensor) -> Tensor:
    """Binary cross-entropy of a confidence head's logits against the chances it is to know, both [..]."""
    return functional.binary_cross_entropy_with_logits(confidence_logits.float(), chances, reduction="none")
