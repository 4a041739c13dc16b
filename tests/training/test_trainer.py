"""A drafter's vocabulary, anchors, teacher, and a step that does what it should and touches nothing else."""

from __future__ import annotations

import pytest
import torch

from outrider.training.capture import GridRunner, Taps
from outrider.training.dataset import inside_repeats
from outrider.training.generate import TextKind
from outrider.training.trainer import Trainer, choose_vocabulary
from tests.training import tiny


def runner_of(trainer: Trainer) -> GridRunner:
    return GridRunner(trainer.target, num_sequences=4, num_positions=20)


def test_the_most_frequent_tokens_make_the_vocabulary() -> None:
    counts = torch.tensor([3, 0, 9, 3, 3, 1])
    assert choose_vocabulary(counts, 3).tolist() == [0, 2, 3]
    assert choose_vocabulary(counts, 6).tolist() == list(range(6))


def test_the_two_vocabularies_are_inverse() -> None:
    trainer = tiny.trainer(tiny.recipe())
    assert torch.equal(trainer.target_to_draft[trainer.draft_to_target], torch.arange(64))
    assert int((trainer.target_to_draft == -1).sum()) == tiny.VOCAB - 64
    assert torch.equal(trainer.head.matrix, trainer.target.embedding[trainer.draft_to_target])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", [TextKind.GREEDY, TextKind.SAMPLED])
def test_steps_lower_the_loss_and_leave_the_target_alone(optimizer: str, kind: TextKind) -> None:
    trainer = tiny.trainer(tiny.recipe(optimize={"optimizer": optimizer, "num_steps": 30}))
    frozen = trainer.target.embedding.clone()
    text = tiny.text(kind=kind)
    losses = [tiny.step(trainer, text).loss.item() for _ in range(25)]
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(trainer.target.embedding, frozen)


def test_text_without_a_supervised_token_changes_nothing() -> None:
    """T-070: zero loss, zero gradient."""
    trainer = tiny.trainer(tiny.recipe())
    text = tiny.text()
    text.first_label = torch.full_like(text.first_label, 99)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert tiny.step(trainer, text).loss.item() == 0.0
    assert all(torch.equal(one, two) for one, two in zip(before, trainer.model.parameters(), strict=True))


def test_anchors_inside_repeats_are_rarer() -> None:
    text = tiny.text(200)
    text.token_ids = (torch.arange(20) % 6).int().expand(200, -1).contiguous()  # a repeat from position 9 on
    anchors = tiny.trainer(tiny.recipe(optimize={"max_anchors": 1})).blocks(text, 0).anchors
    repeats = inside_repeats(text.token_ids)[0]
    num_inside, num_outside = int(repeats[4:19].sum()), int((~repeats)[4:19].sum())
    share = repeats[anchors].float().mean().item()
    assert share == pytest.approx(0.25 * num_inside / (0.25 * num_inside + num_outside), abs=0.12)


def test_most_steps_train_the_first_slots_only() -> None:
    trainer = tiny.trainer(tiny.recipe(optimize={"full_block_every_steps": 3, "num_short_slots": 2}))
    text = tiny.text()
    assert [trainer.blocks(text, step).label_ids.shape[2] for step in range(4)] == [3, 1, 1, 3]
    assert len(tiny.step(trainer, text, number=1).acceptance_by_slot) == 1


def test_the_teacher_is_the_target_itself_at_the_position_of_each_draft() -> None:
    """Also where the drafter does not read the target's last layer."""
    trainer = tiny.trainer(tiny.recipe(drafter={"target_layer_ids": (0,)}, optimize={"distillation_weight": 1.0}))
    assert trainer.recipe.tap_layers(tiny.NUM_LAYERS) == (0, 2)
    token_ids = torch.randint(5, tiny.VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    last, anchors = runner_of(trainer).taps(token_ids, (2,)), torch.tensor([[4, 6], [2, 7]])
    teacher = trainer.teacher_hidden(last, anchors, num_drafts=3)
    logits = trainer.target.logits(last[0])[:, trainer.draft_to_target]  # of the token after each position
    torch.testing.assert_close(trainer.head.teacher_logits(teacher)[0, 1, 2], logits[6 + 2], atol=1e-5, rtol=1e-4)


WEIGHTS = {
    "cross_entropy_weight": 0.1,
    "total_variation_weight": 0.3,
    "distillation_weight": 0.2,
    "probability_l1_weight": 0.9,
    "hidden_l1_weight": 0.7,
    "confidence_weight": 0.5,
}


@pytest.mark.parametrize("name", [*WEIGHTS, "all"])
@torch.no_grad()
def test_the_loss_is_the_weighted_sum_of_its_parts(name: str) -> None:
    """By plain torch over whole logits: what is averaged, where, and what each weight multiplies."""
    chosen = {key: weight if name in (key, "all") else 0.0 for key, weight in WEIGHTS.items()}
    trainer = tiny.trainer(tiny.dspark_recipe(optimize={**chosen, "position_decay": 2.0}))
    text = tiny.text()
    layers, batch = (0, 2), trainer.blocks(text, 0)
    taps = runner_of(trainer).taps(text.token_ids, layers)
    logits = trainer.draft_logits(taps, batch.token_ids, batch.anchors, block_size=5).float()
    drafted = trainer.draft(taps, batch.token_ids, batch.anchors, num_drafts=4)
    teacher = trainer.teacher_hidden(taps[..., tiny.HIDDEN :], batch.anchors, num_drafts=4)
    target = trainer.head.teacher_logits(teacher).softmax(dim=-1)
    ids = trainer.target_to_draft[batch.label_ids]
    known, chances = ids >= 0, logits.softmax(dim=-1)
    label = chances.gather(-1, ids.clamp_min(0)[..., None])[..., 0]
    distance = (chances - target).abs().sum(dim=-1)
    overlap = (1 - distance / 2).clamp(0, 1) if chosen["probability_l1_weight"] else label * known
    assert drafted.confidence is not None
    sure = drafted.confidence.sigmoid()
    parts = {
        "cross_entropy_weight": torch.where(known, -label.log(), 0.0),
        "total_variation_weight": 1 - label * known,
        "distillation_weight": -(target * logits.log_softmax(dim=-1)).sum(dim=-1),
        "probability_l1_weight": distance,
        "hidden_l1_weight": (drafted.hidden - teacher).abs().mean(dim=-1),
        "confidence_weight": -(overlap * sure.log() + (1 - overlap) * (1 - sure).log()),
    }
    weights = batch.label_mask * torch.tensor([1.0, 0.60653066, 0.36787944, 0.22313016])
    cost = sum(chosen[key] * part for key, part in parts.items())
    found = trainer.loss(Taps(taps, layers), batch)
    assert found.loss.item() == pytest.approx(float((cost * weights).sum() / weights.sum()), rel=1e-4)
    expected = (overlap * batch.label_mask).sum(dim=(0, 1)) / batch.label_mask.sum(dim=(0, 1))
    assert found.acceptance_by_slot.tolist() == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6)
