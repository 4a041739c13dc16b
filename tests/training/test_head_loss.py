"""A few rows at a time are the same as all at once, and no tensor of all logits is ever made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.training import head_loss as module
from outrider.training.head_loss import Head, HeadRows, head_loss
from outrider.training.losses import row_losses
from tests.training import tiny

NUM_ROWS, SIZE, VOCAB, RANK = 23, 8, 40, 4
OPTIONS = replace(
    tiny.OPTIMIZE,
    cross_entropy_weight=0.3,
    total_variation_weight=0.7,
    distillation_weight=0.5,
    probability_l1_weight=0.9,
)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(*, teacher: bool = True) -> tuple[Head, HeadRows]:
    head = Head(draw(VOCAB, SIZE, seed=1), cap=3.0, teacher_cap=5.0)
    ids = torch.randint(-1, VOCAB, (NUM_ROWS, 3), generator=torch.Generator().manual_seed(2))
    weights = torch.rand(NUM_ROWS, generator=torch.Generator().manual_seed(3))
    probs = torch.tensor([0.5, 0.3, 0.1]).expand(NUM_ROWS, -1)
    return head, HeadRows(ids, probs, weights, draw(NUM_ROWS, SIZE, seed=4) if teacher else None)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that anything returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            self.largest = max(self.largest, each.numel() if isinstance(each, Tensor) else 0)
        return result


@pytest.mark.parametrize("has_markov", [True, False])
def test_loss_and_gradients_are_those_of_all_rows_at_once(has_markov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", 5 * VOCAB)  # 23 rows: four chunks of five and one of three
    head, rows = made()
    inputs = [draw(NUM_ROWS, SIZE, seed=5), *([draw(NUM_ROWS, RANK, seed=6), draw(VOCAB, RANK, seed=7)] * has_markov)]
    leaves = [each.requires_grad_() for each in inputs]
    hidden, latent, w2 = [*leaves, None, None][:3]
    assert hidden is not None
    losses, wanted = row_losses(
        head.logits(hidden, latent, w2), rows.draft_ids, rows.target_probs, head.teacher_logits(rows.teacher), OPTIONS
    )
    expected = 2.0 * (losses * rows.weights).sum()
    with LargestTensor() as seen:
        loss, chances = head_loss(head, rows, OPTIONS, hidden, latent, w2)
        found = torch.autograd.grad(2.0 * loss, leaves)
    assert seen.largest < NUM_ROWS * VOCAB
    torch.testing.assert_close(2.0 * loss, expected.float())
    torch.testing.assert_close(chances, wanted.float())
    for one, two in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_the_drafters_cap_comes_before_the_markov_bias() -> None:
    """formats.md §3.1: the bias itself is not capped."""
    head = Head(10.0 * torch.eye(3), cap=2.0, teacher_cap=None)
    logits = head.logits(torch.eye(3)[:1], torch.tensor([[1.0]]), torch.tensor([[7.0], [0.0], [0.0]]))
    assert logits[0].tolist() == pytest.approx([2.0 * torch.tanh(torch.tensor(5.0)).item() + 7.0, 0.0, 0.0])
    assert head.teacher_logits(torch.eye(3)[:1])[0].tolist() == [10.0, 0.0, 0.0]
