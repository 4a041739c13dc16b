"""A drafter's vocabulary, anchors, teacher, and a step that does what it should and touches nothing else."""

from __future__ import annotations

import pytest
import torch

from outrider.training.capture import GridRunner
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
