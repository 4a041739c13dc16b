"""The loss by hand, and its gradient against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.training import losses
from outrider.training.losses import block_loss, candidate_log_probs, position_weights

HALF, QUARTER = math.log(0.5), math.log(0.25)
LOGITS = torch.tensor([[[HALF, QUARTER, QUARTER], [QUARTER, QUARTER, HALF]]]) + 7.0  # softmax: those probabilities


def loss_of(draft_ids: Tensor, probs: Tensor, mask: Tensor, *, ce: float, tv: float) -> tuple[float, list[float]]:
    result = block_loss(LOGITS, draft_ids, probs, mask, decay=2.0, cross_entropy_weight=ce, total_variation_weight=tv)
    return result.loss.item(), result.acceptance_by_slot.tolist()


def test_weights_of_slots() -> None:
    """T-077: 1.000, 0.846, 0.717, 0.607 for a decay of 6."""
    assert position_weights(4, decay=6.0).tolist() == pytest.approx([1.0, 0.846, 0.717, 0.607], abs=1e-3)


def test_a_point_mass_is_cross_entropy_and_the_labels_probability() -> None:
    ids, probs, mask = torch.tensor([[[0], [2]]]), torch.ones(1, 2, 1), torch.ones(1, 2, dtype=torch.bool)
    loss, accepted = loss_of(ids, probs, mask, ce=1.0, tv=0.0)
    assert loss == pytest.approx(math.log(2))
    assert accepted == pytest.approx([0.5, 0.5])
    assert loss_of(ids, probs, mask, ce=0.0, tv=1.0)[0] == pytest.approx(0.5)
    assert loss_of(ids, probs, mask, ce=2.0, tv=3.0)[0] == pytest.approx(2 * math.log(2) + 1.5)


def test_soft_targets_overlap_as_rejection_sampling_accepts() -> None:
    ids = torch.tensor([[[0, 1], [0, 2]]])
    probs = torch.tensor([[[0.25, 0.5], [0.5, 0.25]]])
    loss, accepted = loss_of(ids, probs, torch.ones(1, 2, dtype=torch.bool), ce=0.0, tv=1.0)
    assert accepted == pytest.approx([0.25 + 0.25, 0.25 + 0.25])
    assert loss == pytest.approx(0.5)


def test_slots_are_weighed_and_masked() -> None:
    ids, probs = torch.tensor([[[0], [1]]]), torch.ones(1, 2, 1)
    decay = math.exp(-0.5)
    both, _ = loss_of(ids, probs, torch.tensor([[True, True]]), ce=0.0, tv=1.0)
    assert both == pytest.approx((0.5 + 0.75 * decay) / (1 + decay))
    first, accepted = loss_of(ids, probs, torch.tensor([[True, False]]), ce=0.0, tv=1.0)
    assert first == pytest.approx(0.5)
    assert accepted == pytest.approx([0.5, 0.0])


def test_ids_outside_the_draft_vocabulary_cannot_be_accepted() -> None:
    ids, probs = torch.tensor([[[-1, 0], [-1, -1]]]), torch.full((1, 2, 2), 0.5)
    logits = LOGITS.clone().requires_grad_()
    result = block_loss(
        logits,
        ids,
        probs,
        torch.ones(1, 2, dtype=torch.bool),
        decay=2.0,
        cross_entropy_weight=1.0,
        total_variation_weight=1.0,
    )
    assert result.acceptance_by_slot.tolist() == pytest.approx([0.5, 0.0])
    result.loss.backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert logits.grad[0, 1].abs().max() == 0.0


def test_nothing_supervised_is_a_loss_of_zero() -> None:
    """T-070: such a batch takes part with zero loss and zero gradient."""
    logits = LOGITS.clone().requires_grad_()
    result = block_loss(
        logits,
        torch.zeros(1, 2, 1, dtype=torch.int64),
        torch.ones(1, 2, 1),
        torch.zeros(1, 2, dtype=torch.bool),
        decay=2.0,
        cross_entropy_weight=1.0,
        total_variation_weight=1.0,
    )
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0.0


def test_gathered_log_softmax_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "ROWS_AT_A_TIME", 3)  # 8 rows in three parts
    torch.manual_seed(0)
    logits = torch.randn(4, 2, 11, requires_grad=True)
    ids = torch.randint(0, 11, (4, 2, 5))
    ids[..., 1] = ids[..., 0]  # an id twice: its gradients add up
    upstream = torch.randn(4, 2, 5)
    expected = logits.log_softmax(dim=-1).gather(-1, ids)
    (wanted,) = torch.autograd.grad(expected, logits, upstream)
    found = candidate_log_probs(logits, ids)
    torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(found, logits, upstream)
    torch.testing.assert_close(grad, wanted)
