"""The losses that need logits, a few rows at a time: logits of all rows would be most of a step's memory.

A block of 16 slots at 512 anchors of 4 texts has 30,720 rows; their logits over 262,144 tokens are 16 GB in bfloat16,
and a loss needs several such tensors. Here a chunk's gradients are taken while its logits are there, so that nothing is
kept and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.reference import soft_cap
from outrider.training.config import OptimizeConfig
from outrider.training.losses import row_losses

CHUNK_LOGITS = 2**26  # logits of a chunk: 256 MiB in float32


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits; its matrix stays as it is."""

    matrix: Tensor  # [Vd, N]: the target's rows of the draft vocabulary
    cap: float | None  # soft-cap of the drafter's logits, before a Markov bias (formats.md §3.1)
    teacher_cap: float | None  # the target's own

    def logits(self, hidden: Tensor, latent: Tensor | None = None, w2: Tensor | None = None) -> Tensor:
        """hidden [.., N], and [.., r] and [Vd, r] of a Markov head -> logits [.., Vd]."""
        dtype = self.matrix.dtype
        logits = soft_cap(functional.linear(hidden.to(dtype), self.matrix), self.cap)
        if latent is None or w2 is None:
            return logits
        return logits + functional.linear(latent.to(dtype), w2.to(dtype))

    def teacher_logits(self, hidden: Tensor) -> Tensor:
        """The target's last normed hidden states [.., N] -> its logits over draft ids [.., Vd], float32."""
        return soft_cap(functional.linear(hidden.to(self.matrix.dtype), self.matrix).float(), self.teacher_cap)

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Rows that are taken together."""
        size = max(1, CHUNK_LOGITS // len(self.matrix))
        return (slice(start, start + size) for start in range(0, num_rows, size))


@dataclass(frozen=True)
class HeadRows:
    """Rows of drafts and what they should have been."""

    draft_ids: Tensor  # int64 [R, C]; -1: outside the draft vocabulary
    target_probs: Tensor  # float32 [R, C]
    weights: Tensor  # float32 [R]: the share of each row in the loss
    teacher: Tensor | None  # [R, N]: the target's normed hidden states, where a loss compares with its distribution


def head_loss(
    head: Head, rows: HeadRows, options: OptimizeConfig, hidden: Tensor, latent: Tensor | None, w2: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weighted sum of `row_losses` (a scalar, differentiable) and the chances of acceptance, float32 [R].

    hidden [R, N]; latent [R, r] and w2 [Vd, r] where there is a Markov head.
    """
    loss, chances = _InChunks.apply(head, rows, options, hidden, latent, w2)  # type: ignore[no-untyped-call]
    return loss, chances


class _InChunks(torch.autograd.Function):
    """`head_loss`, whose logits live for a chunk only, in both directions."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, rows: HeadRows, options: OptimizeConfig, hidden: Tensor, *markov: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss and, for backward, its gradients."""
        latent, w2 = markov
        w2_there = None if w2 is None else w2.to(head.matrix.dtype)  # once, not once a chunk
        hidden_grad = torch.empty_like(hidden)
        latent_grad = None if latent is None else torch.empty_like(latent)
        w2_grad = None if w2 is None else torch.zeros_like(w2)
        loss = hidden.new_zeros((), dtype=torch.float32)
        chances = torch.empty_like(rows.weights)
        for part in head.chunks(len(hidden)):
            leaves = [None if each is None else each[part].detach().requires_grad_() for each in (hidden, latent)]
            leaves.append(None if w2_there is None else w2_there.detach().requires_grad_())
            with torch.enable_grad():
                share, chances[part] = _chunk(head, rows, part, options, *leaves)
                found = torch.autograd.grad(share, [leaf for leaf in leaves if leaf is not None])
            loss += share.detach()
            hidden_grad[part] = found[0]
            if latent_grad is not None and w2_grad is not None:
                latent_grad[part] = found[1]
                w2_grad += found[2]
        ctx.grads = (hidden_grad, latent_grad, w2_grad)
        ctx.mark_non_differentiable(chances)
        return loss, chances

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what forward found."""
        found = (None if each is None else each * grad.to(each.dtype) for each in ctx.grads)
        return (None, None, None, *found)


def _chunk(
    head: Head, rows: HeadRows, part: slice, options: OptimizeConfig, *leaves: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The weighted loss of a chunk and its chances; leaves are hidden, latent and w2."""
    hidden, latent, w2 = leaves
    assert hidden is not None
    with torch.no_grad():
        taught = None if rows.teacher is None else head.teacher_logits(rows.teacher[part])
    logits = head.logits(hidden, latent, w2)
    losses, chances = row_losses(logits, rows.draft_ids[part], rows.target_probs[part], taught, options)
    return (losses * rows.weights[part]).sum(), chances
