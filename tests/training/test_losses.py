"""The loss by hand, and its gradient against plain torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.training import losses
from outrider.training.losses import (
    BlockLoss,
    candidate_log_probs,
    confidence_losses,
    hidden_losses,
    position_weights,
    row_losses,
)
from tests.training import tiny

HALF, QUARTER = math.log(0.5), math.log(0.25)
LOGITS = torch.tensor([[HALF, QUARTER, QUARTER], [QUARTER, QUARTER, HALF]]) + 7.0  # softmax: those probabilities
NOTHING = replace(tiny.OPTIMIZE, cross_entropy_weight=0.0, total_variation_weight=0.0)


def losses_of(
    draft_ids: Tensor, probs: Tensor, teacher: Tensor | None = None, **weights: float
) -> tuple[Tensor, Tensor]:
    return row_losses(LOGITS, draft_ids, probs, teacher, replace(NOTHING, **weights))


def test_weights_of_slots() -> None:
    """T-077: 1.000, 0.846, 0.717, 0.607 for a decay of 6."""
    assert position_weights(4, decay=6.0).tolist() == pytest.approx([1.0, 0.846, 0.717, 0.607], abs=1e-3)


def test_a_point_mass_is_cross_entropy_and_the_labels_probability() -> None:
    ids, probs = torch.tensor([[0], [2]]), torch.ones(2, 1)
    losses, chances = losses_of(ids, probs, cross_entropy_weight=1.0)
    assert losses.tolist() == pytest.approx([math.log(2)] * 2)
    assert chances.tolist() == pytest.approx([0.5, 0.5])
    assert losses_of(ids, probs, total_variation_weight=1.0)[0].tolist() == pytest.approx([0.5] * 2)
    both, _ = losses_of(ids, probs, cross_entropy_weight=2.0, total_variation_weight=3.0)
    assert both.tolist() == pytest.approx([2 * math.log(2) + 1.5] * 2)


def test_soft_targets_overlap_as_rejection_sampling_accepts() -> None:
    probs = torch.tensor([[0.25, 0.5], [0.5, 0.25]])
    losses, chances = losses_of(torch.tensor([[0, 1], [0, 2]]), probs, total_variation_weight=1.0)
    assert chances.tolist() == pytest.approx([0.25 + 0.25, 0.25 + 0.25])
    assert losses.tolist() == pytest.approx([0.5, 0.5])


def test_ids_outside_the_draft_vocabulary_cannot_be_accepted() -> None:
    logits = LOGITS.clone().requires_grad_()
    options = replace(NOTHING, cross_entropy_weight=1.0, total_variation_weight=1.0)
    losses, chances = row_losses(logits, torch.tensor([[-1, 0], [-1, -1]]), torch.full((2, 2), 0.5), None, options)
    assert chances.tolist() == pytest.approx([0.5, 0.0])
    losses.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert logits.grad[1].abs().max() == 0.0


def test_the_teachers_distribution_by_hand() -> None:
    """L1 is twice the total variation; the chance of acceptance is what is left of 1 (formats.md §3.2)."""
    teacher = torch.tensor([[QUARTER, HALF, QUARTER], [QUARTER, QUARTER, HALF]])
    ids, probs = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    losses, chances = losses_of(ids, probs, teacher, probability_l1_weight=0.9)
    assert losses.tolist() == pytest.approx([0.9 * 0.5, 0.0], abs=1e-6)
    assert chances.tolist() == pytest.approx([0.75, 1.0])
    losses, chances = losses_of(ids, probs, teacher, distillation_weight=2.0)
    entropy = -(0.5 * HALF + 0.5 * QUARTER)
    apart = entropy + 0.25 * math.log(2)  # and KL(1/4 1/2 1/4 || 1/2 1/4 1/4)
    assert losses.tolist() == pytest.approx([2 * apart, 2 * entropy])
    assert chances.tolist() == pytest.approx([0.5, 0.25])


def test_hidden_states_differ_by_their_mean_distance() -> None:
    hidden, teacher = torch.tensor([[1.0, -1.0], [0.0, 3.0]]), torch.tensor([[1.0, 1.0], [0.5, 2.5]])
    assert hidden_losses(hidden, teacher).tolist() == pytest.approx([1.0, 0.5])


def test_confidence_is_asked_for_the_chance() -> None:
    """Least, and that chance's entropy, where it is right."""
    chances = torch.tensor([0.75, 0.75])
    right, wrong = confidence_losses(torch.tensor([math.log(3.0), 0.0]), chances).tolist()
    assert right == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * QUARTER))
    assert wrong == pytest.approx(math.log(2))


def test_parts_of_a_step_add_up() -> None:
    one = BlockLoss(torch.tensor(0.5), torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]))
    two = BlockLoss(torch.tensor(0.25), torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    assert (one + two).loss.item() == 0.75
    assert (one + two).acceptance_by_slot.tolist() == [0.5, 0.0]


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
