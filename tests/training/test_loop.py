"""Steps: texts and target passes are shared, every process does its part, and broken numbers end it."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from outrider.errors import ConfigError
from outrider.training import loop as loop_module
from outrider.training.capture import GridRunner, Taps
from outrider.training.dataset import BlockBatch, BlockDataset
from outrider.training.generate import TextKind
from outrider.training.loop import TrainingRun, all_tap_layers, train
from outrider.training.losses import BlockLoss
from outrider.training.trainer import Trainer
from tests.training import tiny


def runner_of(trainer: Trainer) -> GridRunner:
    return GridRunner(trainer.target, num_sequences=4, num_positions=20)


def dataset() -> BlockDataset:
    return BlockDataset([tiny.text(8), tiny.text(8, kind=TextKind.SAMPLED)], num_held_out=2, seed=1)


def test_tap_layers_of_several_recipes_are_joined_in_order() -> None:
    recipes = [tiny.recipe(drafter={"target_layer_ids": ids}) for ids in ((2, 0), (1, 2))]
    assert all_tap_layers(recipes, num_target_layers=3) == (0, 1, 2)
    taught = tiny.recipe(drafter={"target_layer_ids": (0,)}, optimize={"hidden_l1_weight": 0.5})
    assert all_tap_layers([taught], num_target_layers=9) == (0, 8)


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


def test_training_ends_after_the_step_that_passes_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does at least one; steps, seconds and rows add up over calls; progress tells pace and time left."""
    monkeypatch.setattr(loop_module, "LOG_EVERY_STEPS", 1)
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
    run, step = TrainingRun({"tiny": trainer}), Trainer.accumulate

    def spoilt(self: Trainer, taps: Taps, batch: BlockBatch, *, total_weight: torch.Tensor) -> BlockLoss:
        result = step(self, taps, batch, total_weight=total_weight)
        if run.num_steps_done == 3 and broken == "loss":
            return dataclasses.replace(result, loss=result.loss * torch.nan)
        if run.num_steps_done == 3:
            self.model.fc.weight.data[0, 0] = torch.inf
        return result

    monkeypatch.setattr(Trainer, "accumulate", spoilt)
    until_step = 6 if broken == "loss" else 4  # a weight's first trace may be the checkpoint it would go into
    with pytest.raises(ConfigError, match=f"tiny: {named} is not finite. Start again with a lower learning_rate"):
        train(run, runner_of(trainer), dataset(), until_step=until_step, progress=lambda line: None)
