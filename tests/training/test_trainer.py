"""Fitting: vocabulary, schedule, optimisers, and a step that does what it should and touches nothing else."""

from __future__ import annotations

import dataclasses
import time
from itertools import pairwise

import pytest
import torch

from outrider.errors import ConfigError
from outrider.training import trainer as trainer_module
from outrider.training.capture import GridRunner
from outrider.training.dataset import BlockBatch, BlockDataset, inside_repeats
from outrider.training.generate import TextKind
from outrider.training.losses import BlockLoss
from outrider.training.trainer import (
    Trainer,
    TrainingRun,
    all_tap_layers,
    choose_vocabulary,
    learning_rate_factor,
    make_optimizers,
    select_taps,
    train,
)
from tests.training import tiny


def runner_of(trainer: Trainer) -> GridRunner:
    return GridRunner(trainer.target, num_sequences=4, num_positions=20)


def dataset() -> BlockDataset:
    return BlockDataset([tiny.text(8), tiny.text(8, kind=TextKind.SAMPLED)], num_held_out=2, seed=1)


def test_the_most_frequent_tokens_make_the_vocabulary() -> None:
    counts = torch.tensor([3, 0, 9, 3, 3, 1])
    assert choose_vocabulary(counts, 3).tolist() == [0, 2, 3]
    assert choose_vocabulary(counts, 6).tolist() == list(range(6))


def test_the_two_vocabularies_are_inverse() -> None:
    trainer = tiny.trainer(tiny.recipe())
    assert torch.equal(trainer.target_to_draft[trainer.draft_to_target], torch.arange(64))
    assert int((trainer.target_to_draft == -1).sum()) == tiny.VOCAB - 64
    assert torch.equal(trainer.head, trainer.target.embedding[trainer.draft_to_target])


def test_the_learning_rate_warms_up_and_falls_to_nothing() -> None:
    options = dataclasses.replace(tiny.OPTIMIZE, num_steps=100, warmup_fraction=0.1)
    factors = [learning_rate_factor(step, options) for step in range(101)]
    assert factors[:2] == pytest.approx([0.1, 0.2])
    assert max(factors) == pytest.approx(factors[9], abs=0.03)
    assert factors[50] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)
    assert all(later <= earlier for earlier, later in pairwise(factors[9:]))


def test_muon_takes_the_matrices_and_adamw_the_norms() -> None:
    model = tiny.trainer(tiny.recipe()).model
    muon, adamw = make_optimizers(model, dataclasses.replace(tiny.OPTIMIZE, optimizer="muon"))
    assert {p.dim() for p in muon.param_groups[0]["params"]} == {2}
    assert {p.dim() for p in adamw.param_groups[0]["params"]} == {1}
    num_taken = sum(len(one.param_groups[0]["params"]) for one in (muon, adamw))
    assert num_taken == len(list(model.parameters()))
    with pytest.raises(ConfigError, match="'sgd' is not one of adamw, muon"):
        make_optimizers(model, dataclasses.replace(tiny.OPTIMIZE, optimizer="sgd"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", [TextKind.GREEDY, TextKind.SAMPLED])
def test_steps_lower_the_loss_and_leave_the_target_alone(optimizer: str, kind: TextKind) -> None:
    trainer = tiny.trainer(tiny.recipe(optimize={"optimizer": optimizer, "num_steps": 30}))
    frozen = trainer.target.embedding.clone()
    text = tiny.text(kind=kind)
    taps = runner_of(trainer).taps(text.token_ids.long(), trainer.recipe.drafter.target_layer_ids)
    batch = trainer.blocks(text, 0)
    losses = [trainer.step(taps, batch).loss.item() for _ in range(25)]
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(trainer.target.embedding, frozen)


def test_text_without_a_supervised_token_changes_nothing() -> None:
    """T-070: zero loss, zero gradient."""
    trainer = tiny.trainer(tiny.recipe())
    text = tiny.text()
    text.first_label = torch.full_like(text.first_label, 99)
    taps = runner_of(trainer).taps(text.token_ids.long(), trainer.recipe.drafter.target_layer_ids)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert trainer.step(taps, trainer.blocks(text, 0)).loss.item() == 0.0
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
    taps = runner_of(trainer).taps(text.token_ids, trainer.recipe.drafter.target_layer_ids)
    assert len(trainer.step(taps, trainer.blocks(text, 1)).acceptance_by_slot) == 1


def test_tap_layers_of_several_recipes_are_joined_in_order() -> None:
    recipes = [tiny.recipe(drafter={"target_layer_ids": ids}) for ids in ((2, 0), (1, 2))]
    assert all_tap_layers(recipes) == (0, 1, 2)


def test_taps_are_selected_by_layer_in_the_recipes_order() -> None:
    taps = torch.arange(3.0).repeat_interleave(tiny.HIDDEN).expand(1, 2, -1)
    trainer = tiny.trainer(tiny.recipe(drafter={"target_layer_ids": (2, 0)}))
    chosen = select_taps(taps, (0, 1, 2), trainer)
    assert chosen[0, 0].tolist() == [2.0] * tiny.HIDDEN + [0.0] * tiny.HIDDEN
    assert select_taps(taps, (2, 0), trainer) is taps


def test_drafters_trained_side_by_side_are_those_trained_alone() -> None:
    """Sharing texts and target passes changes nothing; the log begins and ends with the run, with unscaled losses."""
    target = tiny.target()
    recipes = [tiny.recipe(name="one"), tiny.recipe(name="two", drafter={"target_layer_ids": (1,)})]

    def fitted(names: set[str]) -> dict[str, torch.Tensor]:
        run = TrainingRun({r.name: tiny.trainer(r, on=target) for r in recipes if r.name in names})
        train(run, runner_of(next(iter(run.trainers.values()))), dataset(), until_step=3, progress=lambda line: None)
        assert all([row["step"] for row in rows] == [0, 2] for rows in run.logs.values())
        assert all(
            row["loss"] > 0 and len(row["acceptance_by_slot"]) == 3 for rows in run.logs.values() for row in rows
        )
        return {name: trainer.model.fc.weight.detach() for name, trainer in run.trainers.items()}

    together = fitted({"one", "two"})
    for name in together:
        torch.testing.assert_close(fitted({name})[name], together[name], atol=1e-5, rtol=1e-4)


def test_the_teacher_is_the_target_itself_at_the_position_of_each_draft() -> None:
    recipe = tiny.recipe()
    last = len(tiny.trainer(recipe).target.config.layers) - 1
    layers = (0, last)
    shaped = dataclasses.replace(
        recipe,
        drafter=dataclasses.replace(recipe.drafter, target_layer_ids=layers),
        optimize=dataclasses.replace(recipe.optimize, distillation_weight=1.0),
    )
    trainer = tiny.trainer(shaped)
    runner = runner_of(trainer)
    token_ids = torch.randint(5, tiny.VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    taps, anchors = runner.taps(token_ids, layers), torch.tensor([[4, 6], [2, 7]])
    probs = trainer.teacher_probs(taps, anchors, num_labels=3)
    size = trainer.target.config.hidden_size
    logits = trainer.target.logits(taps[0, :, size:])[:, trainer.draft_to_target]  # of the token after each position
    torch.testing.assert_close(probs[0, 1, 2], logits[6 + 2].softmax(dim=-1), atol=1e-5, rtol=1e-4)
    with pytest.raises(ConfigError, match="distillation_weight"):
        tiny.trainer(dataclasses.replace(shaped, drafter=dataclasses.replace(shaped.drafter, target_layer_ids=(0,))))


def test_training_ends_after_the_step_that_passes_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does at least one; steps, seconds and rows add up over calls; progress tells pace and time left."""
    monkeypatch.setattr(trainer_module, "LOG_EVERY_STEPS", 1)
    trainer = tiny.trainer(tiny.recipe(optimize={"num_steps": 5}))
    run, lines, seconds = TrainingRun({"tiny": trainer}), list[str](), [0.0]
    runner, texts = runner_of(trainer), dataset()
    for num_done in (1, 2):
        train(run, runner, texts, until_step=5, deadline_s=time.perf_counter(), progress=lines.append)
        assert run.num_steps_done == num_done
        seconds.append(run.seconds)
    train(run, runner, texts, until_step=5, progress=lines.append)
    assert run.is_finished
    assert [row["step"] for row in run.logs["tiny"]] == list(range(5))
    assert 0.0 < seconds[1] < seconds[2] < run.seconds
    assert lines[1].startswith("step 1/5 tiny ")
    assert lines[1].endswith(" s left")
    assert " steps/s" in lines[1]


@pytest.mark.parametrize(("broken", "named"), [("loss", "the loss of step 3"), ("weights", "the weights after step 3")])
def test_a_number_that_is_not_finite_ends_training_and_is_told_with_its_step(
    broken: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny.trainer(tiny.recipe(optimize={"num_steps": 9}))
    run, step = TrainingRun({"tiny": trainer}), Trainer.step

    def spoilt(self: Trainer, taps: torch.Tensor, batch: BlockBatch) -> BlockLoss:
        result = step(self, taps, batch)
        if run.num_steps_done == 3 and broken == "loss":
            return dataclasses.replace(result, loss=result.loss * torch.nan)
        if run.num_steps_done == 3:
            self.model.fc.weight.data[0, 0] = torch.inf
        return result

    monkeypatch.setattr(Trainer, "step", spoilt)
    until_step = 6 if broken == "loss" else 4  # a weight's first trace may be the checkpoint it would go into
    with pytest.raises(ConfigError, match=f"tiny: {named} is not finite. Start again with a lower learning_rate"):
        train(run, runner_of(trainer), dataset(), until_step=until_step, progress=lambda line: None)
