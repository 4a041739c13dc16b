"""A checkpoint holds all that training needs, only ever whole, and goes with its own recipes and text only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import environment
from outrider.errors import ConfigError
from outrider.training import checkpoint, loop
from outrider.training.capture import GridRunner
from outrider.training.checkpoint import CheckpointOptions, resume, write_checkpoint
from outrider.training.config import Recipe
from outrider.training.dataset import BlockDataset
from outrider.training.export import exported_tensors
from outrider.training.generate import TextKind
from outrider.training.loop import TrainingRun, train
from tests.training import tiny

TEXT: dict[str, Any] = {"target_sha256": "ab" * 32, "num_tokens": 5, "openings_by_category": {"code": 1}}
NUM_STEPS = 8


def recipes(optimizer: str = "adamw") -> list[Recipe]:
    options = {"optimizer": optimizer, "num_steps": NUM_STEPS, "warmup_fraction": 0.5, "full_block_every_steps": 2}
    shape = {"target_layer_ids": (1,)}
    return [tiny.recipe(name="one", optimize=options), tiny.recipe(name="two", drafter=shape, optimize=options)]


def fresh_run(chosen: list[Recipe] | None = None) -> TrainingRun:
    return TrainingRun({recipe.name: tiny.trainer(recipe) for recipe in chosen or recipes()})


def go_on(run: TrainingRun, until_step: int) -> None:
    runner = GridRunner(run.trainers["one"].target, num_sequences=4, num_positions=20)
    dataset = BlockDataset([tiny.text(8), tiny.text(8, kind=TextKind.SAMPLED)], num_held_out=2, seed=1)
    train(run, runner, dataset, until_step=until_step, progress=lambda line: None)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_bit_for_bit_the_one_that_was_not_interrupted(
    optimizer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 1)
    whole, first = fresh_run(recipes(optimizer)), fresh_run(recipes(optimizer))
    go_on(whole, NUM_STEPS)
    go_on(first, 3)
    write_checkpoint(tmp_path / "run.pt", first, text=TEXT)
    go_on(first, 5)  # lost with the machine
    torch.manual_seed(99)  # whatever state the next process is in
    torch.rand(7)
    second = fresh_run(recipes(optimizer))
    resume(tmp_path / "run.pt", second, text=TEXT)
    assert second.num_steps_done == 3
    assert 0.0 < second.seconds < first.seconds
    go_on(second, NUM_STEPS)
    assert second.logs == whole.logs
    assert [row["step"] for row in second.logs["two"]] == list(range(NUM_STEPS))
    for name in ("one", "two"):
        expected, found = exported_tensors(whole.trainers[name]), exported_tensors(second.trainers[name])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        for key, value in whole.trainers[name].model.state_dict().items():
            assert torch.equal(second.trainers[name].model.state_dict()[key], value), key


def test_a_checkpoint_carries_float32_weights_and_its_environment(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run.pt", fresh_run(), text=TEXT)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    assert state["environment"]["packages"] == environment.describe()["packages"]
    assert {value.dtype for value in state["trainers"]["one"]["model"][0].values()} == {torch.float32}
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_other_recipes_and_other_text_are_refused_with_the_difference(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run.pt", fresh_run(), text=TEXT)
    one, two = recipes()
    slower = tiny.recipe(name="two", drafter={"target_layer_ids": (1,)}, optimize={"num_steps": NUM_STEPS})
    cases = [
        ([one], TEXT, "recipes.two is only there"),
        ([one, slower], TEXT, r"recipes.two.optimize.full_block_every_steps is 2 there, 1 here; .*warmup_fraction"),
        ([one, two], {**TEXT, "target_sha256": "cd"}, "text.target_sha256 is 'abab.*' there, 'cd' here"),
        (
            [one, two],
            {**TEXT, "openings_by_category": {"code": 2}},
            "text.openings_by_category.code is 1 there, 2 here",
        ),
    ]
    for chosen, text, difference in cases:
        run = fresh_run(chosen)
        before = run.trainers["one"].model.fc.weight.clone()
        with pytest.raises(ConfigError, match=rf"run.pt is of another run: {difference}.*name another checkpoint"):
            resume(tmp_path / "run.pt", run, text=text)
        assert run.num_steps_done == 0
        assert torch.equal(run.trainers["one"].model.fc.weight, before)


def test_a_write_that_fails_leaves_the_checkpoint_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, run = tmp_path / "run.pt", fresh_run()
    write_checkpoint(path, run, text=TEXT)
    before, save = path.read_bytes(), torch.save

    def fail_late(state: Any, file: Any) -> None:
        save(state, file)
        file.truncate(100)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", fail_late)
    run.num_steps_done = 3
    with pytest.raises(ConfigError, match=r"run.pt could not be written: .*No space left.*One written before is untou"):
        write_checkpoint(path, run, text=TEXT)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["run.pt"]


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    write_checkpoint(path, fresh_run(), text=TEXT)
    whole = path.read_bytes()
    for content in (b"", b"text, not a checkpoint", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"run.pt is damaged or something else"):
            resume(path, fresh_run(), text=TEXT)
    for foreign in ({"facts": {}}, [1, 2], torch.ones(3)):
        torch.save(foreign, path)
        with pytest.raises(ConfigError, match=r"run.pt is damaged or something else"):
            resume(path, fresh_run(), text=TEXT)
    torch.save({"schema": 0, "made_of": {}}, path)
    with pytest.raises(ConfigError, match="has schema 0, this version reads 1"):
        resume(path, fresh_run(), text=TEXT)


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for every, stop in ((0, None), (5, -1.0), (5, math.nan)):
        with pytest.raises(ConfigError, match=f"every_steps={every}, stop_after_s={stop}"):
            CheckpointOptions(file=tmp_path / "run.pt", every_steps=every, stop_after_s=stop)
