"""Anchors, labels and masks point at the same positions; repeats and draws mean what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.errors import ConfigError
from outrider.metrics import ends_known_ngram
from outrider.training.dataset import (
    BlockDataset,
    TextPool,
    anchor_candidates,
    inside_repeats,
    make_blocks,
    sample_anchors,
    step_generator,
)
from outrider.training.generate import TextBatch, TextKind
from outrider.training.losses import row_losses
from tests.training import tiny


def answer(first: int = 5, end: int = 10, num_positions: int = 12) -> TextBatch:
    """One text of distinct ids, supervised at positions first .. end - 1."""
    ids = torch.arange(20, 20 + num_positions, dtype=torch.int32)[None]
    return TextBatch(TextKind.GREEDY, ids, torch.tensor([first]), torch.tensor([end]), None, None)


def test_supervised_pairs_and_their_labels() -> None:
    """T-067: slot i predicts the token at anchor + i; labels and mask refer to the same positions."""
    anchors = torch.tensor([[4, 5, 7]])
    batch = make_blocks(answer(), anchors, torch.ones_like(anchors, dtype=torch.bool), block_size=4)
    pairs = [(int(anchors[0, a]), int(k) + 1) for a, k in batch.label_mask[0].nonzero()]
    assert pairs == [(4, 1), (4, 2), (4, 3), (5, 1), (5, 2), (5, 3), (7, 1), (7, 2)]
    for a, k in batch.label_mask[0].nonzero():
        assert batch.label_ids[0, a, k] == 20 + anchors[0, a] + k + 1


@pytest.mark.parametrize(("shift", "low", "high"), [(0, -1e-9, 1e-6), (1, 10.0, 100.0)])
def test_a_drafter_that_knows_the_text_has_no_loss(shift: int, low: float, high: float) -> None:
    """T-067: a shift by one anywhere is a large loss, not a slightly worse one."""
    anchors = torch.tensor([[4, 5, 7]])
    batch = make_blocks(answer(), anchors + shift, torch.ones_like(anchors, dtype=torch.bool), block_size=4)
    logits = torch.full((3, 3, 50), -50.0)
    right = 20 + anchors[0, :, None] + torch.arange(1, 4)
    logits.scatter_(2, right[..., None], 0.0)
    kept = batch.label_mask[0]
    losses, _ = row_losses(
        logits[kept],
        batch.candidate_ids[0][kept],
        batch.candidate_probs[0][kept],
        None,
        replace(tiny.OPTIMIZE, cross_entropy_weight=1.0, total_variation_weight=0.0),
    )
    loss = losses.mean().item()
    assert low <= loss < high


def test_anchors_are_the_positions_before_supervised_ones() -> None:
    """T-077: the first answer token is drafted from the last prompt token."""
    assert anchor_candidates(answer()).nonzero()[:, 1].tolist() == [4, 5, 6, 7, 8]
    assert not anchor_candidates(answer(first=8, end=6)).any()


def test_anchors_that_are_not_real_carry_no_loss() -> None:
    anchors, real = torch.tensor([[4, 5]]), torch.tensor([[True, False]])
    assert make_blocks(answer(), anchors, real, block_size=4).label_mask.sum(dim=-1).tolist() == [[3, 0]]


def test_soft_targets_are_those_of_the_labels_position() -> None:
    text = tiny.text(2, kind=TextKind.SAMPLED)
    anchors = torch.tensor([[6, 18], [4, 9]])
    batch = make_blocks(text, anchors, torch.ones_like(anchors, dtype=torch.bool), block_size=3)
    assert batch.label_mask.tolist() == [[[True, True], [True, False]], [[True, True], [True, True]]]
    assert torch.equal(batch.candidate_ids[..., 0], batch.label_ids)
    assert batch.candidate_probs.dtype == torch.float32
    assert batch.candidate_probs[0, 0, 0].tolist() == pytest.approx([0.6, 0.1, 0.1], abs=1e-3)


@pytest.mark.parametrize("ngram", [1, 2, 4])
def test_repeats_are_those_of_the_metrics(ngram: int) -> None:
    ids = torch.randint(0, 3, (3, 60), generator=torch.Generator().manual_seed(1))
    ids[1] = torch.arange(60) % 5  # a text that goes round in circles
    ids[2] = torch.arange(60)
    found = inside_repeats(ids, ngram=ngram).tolist()
    for row, flags in zip(ids.tolist(), found, strict=True):
        assert flags == [ends_known_ngram(row[: end + 1], ngram) for end in range(len(row))]


def uniform(weights: torch.Tensor, *, seed: int) -> torch.Tensor:
    return torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed))


def test_anchors_are_drawn_uniformly_and_never_where_the_weight_is_zero() -> None:
    """T-073: of 7 candidates each is among 5 anchors in 5/7 of 7,000 draws."""
    weights = torch.zeros(7_000, 12)
    weights[:, 3:10] = 1.0
    anchors, real = sample_anchors(weights, 5, uniform(weights, seed=2))
    assert bool(real.all())
    counts = torch.bincount(anchors.flatten(), minlength=12)
    assert counts[:3].sum() == counts[10:].sum() == 0
    assert counts[3:10].tolist() == pytest.approx([5_000] * 7, abs=4 * (7_000 * 5 / 7 * 2 / 7) ** 0.5)
    assert all(len(set(row)) == 5 for row in anchors[:100].tolist())


def test_a_light_anchor_is_drawn_in_proportion_and_spare_ones_are_not_real() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.25, 0.0]]).expand(8_000, -1)
    anchors, _ = sample_anchors(weights, 1, uniform(weights, seed=3))
    assert (anchors == 2).float().mean().item() == pytest.approx(0.2, abs=0.02)
    anchors, real = sample_anchors(weights[:50], 3, uniform(weights[:50], seed=3))
    assert real.sum(dim=1).tolist() == [2] * 50
    assert set(anchors[real].tolist()) == {1, 2}


def test_a_pool_joins_batches_of_one_kind() -> None:
    pool = TextPool([tiny.text(3, kind=TextKind.FILTERED), tiny.text(2, kind=TextKind.FILTERED, seed=1)])
    assert len(pool) == 5
    taken = pool.take(torch.tensor([4, 0]))
    assert torch.equal(taken.token_ids[0], tiny.text(2, seed=1).token_ids[1])
    assert taken.candidate_ids is not None
    assert torch.equal(taken.candidate_ids[..., 0], taken.token_ids)
    assert TextPool([tiny.text(3)]).take(torch.tensor([1])).candidate_ids is None


def test_held_out_text_is_never_trained_on() -> None:
    greedy, soft = tiny.text(6), tiny.text(6, kind=TextKind.SAMPLED, seed=1)
    dataset = BlockDataset([greedy, soft], num_held_out=2, seed=4)
    assert torch.equal(dataset.held_out(TextKind.GREEDY).token_ids, greedy.token_ids[4:])
    held_out = {tuple(row) for kind in (greedy, soft) for row in kind.token_ids[4:].tolist()}
    drawn = [dataset.text(step, num_sequences=3) for step in range(40)]
    assert {text.kind for text in drawn} == {TextKind.GREEDY, TextKind.SAMPLED}
    rows = {tuple(row) for text in drawn for row in text.token_ids.tolist()}
    assert len(rows) == 8
    assert not rows & held_out


def test_the_text_of_a_step_depends_on_nothing_but_seed_and_step() -> None:
    batches = [tiny.text(9), tiny.text(9, kind=TextKind.SAMPLED, seed=1)]
    dataset = BlockDataset(batches, num_held_out=1, seed=4)
    forward = [dataset.text(step, num_sequences=3).token_ids for step in range(8)]
    back = [BlockDataset(batches, num_held_out=1, seed=4).text(step, num_sequences=3) for step in reversed(range(8))]
    assert all(torch.equal(one, two.token_ids) for one, two in zip(forward, reversed(back), strict=True))
    other = BlockDataset(batches, num_held_out=1, seed=5)
    assert not all(torch.equal(other.text(step, num_sequences=3).token_ids, forward[step]) for step in range(8))


def test_steps_seeds_and_purposes_draw_apart() -> None:
    """First draws over many steps are as uniform as those of one long stream."""
    first = torch.stack([torch.rand(2, generator=step_generator("text", seed=1, step=step)) for step in range(4_000)])
    assert first.mean(dim=0).tolist() == pytest.approx([0.5, 0.5], abs=0.02)
    assert torch.corrcoef(torch.cat([first[1:], first[:-1]], dim=1).T).fill_diagonal_(0.0).abs().max() < 0.07
    kinds = [("text", 1, 12), ("anchors", 1, 12), ("text", 11, 2), ("text", 1 + 2**32, 12)]
    drawn = [torch.rand(1, generator=step_generator(what, seed=seed, step=step)).item() for what, seed, step in kinds]
    assert len(set(drawn)) == 4


def test_counts_are_of_labels_in_training_text() -> None:
    short = replace(answer(), token_ids=torch.tensor([[7, 7, 7, 7, 7, 1, 2, 2, 3, 3, 9, 9]]).int())
    dataset = BlockDataset([short, tiny.text(1, num_positions=12)], num_held_out=1, seed=0)
    assert dataset.token_counts(12).tolist() == [0, 1, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0]


def test_text_that_is_all_held_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_held_out_sequences=4 leaves none of 4 greedy"):
        BlockDataset([tiny.text(4)], num_held_out=4, seed=0)
