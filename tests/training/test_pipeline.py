"""A whole run in small: a target directory in, a drafter directory out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import ConfigError
from outrider.kernels.reference import TorchKernels
from outrider.models.registry import load_drafter
from outrider.training.checkpoint import CheckpointOptions
from outrider.training.generate import TextKind
from outrider.training.losses import BlockLoss
from outrider.training.pipeline import RunOptions, make_text, open_target, read_text, train_drafters, write_text
from outrider.training.trainer import Trainer
from tests.training import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target/ and data.pt."""
    folder = tmp_path_factory.mktemp("run")
    make_text(
        tiny.write_target(folder / "target"), tiny.recipe(), folder / "data.pt", device=CPU, progress=lambda line: None
    )
    return folder


def test_text_is_read_back_as_it_was_written(run: Path) -> None:
    facts, batches = read_text(run / "data.pt", device=CPU)
    kinds = [TextKind.GREEDY, TextKind.GREEDY, TextKind.SAMPLED, TextKind.FILTERED]
    assert [batch.kind for batch in batches] == kinds
    assert facts["num_tokens"] == sum(int(batch.num_valid.sum()) for batch in batches)
    assert sum(facts["openings_by_category"].values()) == 32
    assert all(batch.token_ids[:, 0].eq(tiny.BOS_ID).all() for batch in batches)


def test_a_run_leaves_drafters_with_their_records(run: Path, tmp_path: Path) -> None:
    target, messages = run / "target", list[str]()
    recipes = [tiny.recipe(name="one"), tiny.recipe(name="two", drafter={"target_layer_ids": (1,)})]
    records = train_drafters(target, recipes, run / "data.pt", tmp_path, device=CPU, progress=messages.append)
    files = ["config.json", "model.safetensors", "training_record.json"]
    for name in ("one", "two"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == files
        record = json.loads((tmp_path / name / "training_record.json").read_text())
        assert record["held_out"] == records[name]["held_out"]
        assert record["recipe"]["name"] == name
        assert record["num_parameters"] > 0
        assert record["text"]["target_sha256"] == open_target(target, recipes[0], device=CPU)[0].sha256()
        assert [walk["draft_length"] for walk in record["held_out"]["greedy"]] == [1, 2, 3]
        assert all(0.0 <= chance <= 1.0 for chance in record["held_out"]["sampled"] + record["held_out"]["filtered"])
    assert [line for line in messages if line.startswith("two: ")]
    serving = tiny.target(kernels=TorchKernels(torch.float32), norm_offset=1.0)
    assert load_drafter(tmp_path / "two", serving, target_name="tiny", context_length=32).config.target_layer_ids == (
        1,
    )


def test_text_of_another_target_is_refused(run: Path, tmp_path: Path) -> None:
    other = tiny.write_target(tmp_path / "target")
    (other / "config.json").write_text(json.dumps({**tiny.CONFIG, "final_logit_softcapping": 30.0}))
    with pytest.raises(ConfigError, match="written by another target"):
        train_drafters(other, [tiny.recipe()], run / "data.pt", tmp_path, device=CPU, progress=lambda line: None)


def test_text_of_another_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    """Weights are the same; the ids mean something else."""
    other = tiny.write_target(tmp_path / "target")
    spelled = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(spelled.replace('"a":', '"%":').replace('"%": 9', '"a": 9'))
    assert (other / "tokenizer.json").read_text() != spelled
    with pytest.raises(ConfigError, match=r"made with another tokenizer .* Put back the target's own tokenizer.json"):
        train_drafters(other, [tiny.recipe()], run / "data.pt", tmp_path, device=CPU, progress=lambda line: None)


def test_text_without_any_answer_is_refused(run: Path, tmp_path: Path) -> None:
    facts, batches = read_text(run / "data.pt", device=CPU)
    for batch in batches:
        batch.first_label = batch.num_valid.clone()
    write_text(tmp_path / "empty.pt", facts, batches)
    with pytest.raises(ConfigError, match=r"empty.pt: no sequence has an answer to train on"):
        train_drafters(
            run / "target", [tiny.recipe()], tmp_path / "empty.pt", tmp_path, device=CPU, progress=lambda line: None
        )


def test_a_recipe_that_starts_from_a_drafter_goes_on_from_it(run: Path, tmp_path: Path) -> None:
    """No step taken, so the drafter comes out as it went in; an int8 group that was rounded rounds to itself."""
    recipe = tiny.recipe()
    train_drafters(run / "target", [recipe], run / "data.pt", tmp_path / "old", device=CPU, progress=lambda line: None)
    again = replace(recipe, warm_start=str(tmp_path / "old" / "tiny"), optimize=replace(recipe.optimize, num_steps=1))
    again = replace(again, optimize=replace(again.optimize, learning_rate=1e-12))
    train_drafters(run / "target", [again], run / "data.pt", tmp_path / "new", device=CPU, progress=lambda line: None)
    old, new = (load_file(tmp_path / name / "tiny" / "model.safetensors") for name in ("old", "new"))
    assert old.keys() == new.keys()
    for name, values in old.items():
        assert (values.float() - new[name].float()).abs().max() <= (1.0 if values.dtype == torch.int8 else 1e-3), name
    assert torch.equal(old["d2t"], new["d2t"])


def test_taps_kept_with_the_text_train_the_same_drafter(run: Path, tmp_path: Path) -> None:
    """Whatever the order in which the drafter reads its layers; text with taps of other layers is refused."""
    base = tiny.recipe(drafter={"target_layer_ids": (2, 0)})
    keeping = replace(base, generate=replace(tiny.GENERATE, keep_taps=True))
    losses = []
    for recipe in (base, keeping):
        data = tmp_path / "data.pt"
        make_text(run / "target", recipe, data, device=CPU, progress=lambda line: None)
        records = train_drafters(run / "target", [recipe], data, tmp_path, device=CPU, progress=lambda line: None)
        losses.append([row["loss"] for row in records["tiny"]["log"]])
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    other = replace(keeping, drafter=replace(keeping.drafter, target_layer_ids=(1, 2)))
    with pytest.raises(ConfigError, match=r"holds taps of layers \[0, 2\], but the recipes read \[1, 2\]"):
        train_drafters(run / "target", [other], data, tmp_path, device=CPU, progress=lambda line: None)


def test_recipes_that_do_not_go_together_are_refused(run: Path, tmp_path: Path) -> None:
    one = tiny.recipe(name="one")
    others = [
        one,
        tiny.recipe(name="two", optimize={"num_steps": 4}),
        replace(tiny.recipe(name="two"), generate=replace(tiny.GENERATE, seed=2)),
    ]
    for other in others:
        with pytest.raises(ConfigError, match="recipes trained together"):
            train_drafters(
                run / "target", [one, other], run / "data.pt", tmp_path, device=CPU, progress=lambda line: None
            )


def test_a_run_in_several_calls_is_the_run_in_one(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stopped once by the clock, lost once between two checkpoints; every call that ends leaves a usable drafter."""
    recipe, data, kept = tiny.recipe(optimize={"num_steps": 6}), run / "data.pt", tmp_path / "run.pt"

    def call(out: str, keeping: CheckpointOptions | None) -> tuple[dict[str, Any], list[str]]:
        messages: list[str] = []
        options = RunOptions(keeping=keeping)
        train_drafters(
            run / "target", [recipe], data, tmp_path / out, device=CPU, progress=messages.append, options=options
        )
        return json.loads((tmp_path / out / "tiny" / "training_record.json").read_text()), messages

    record, messages = call("parts", CheckpointOptions(file=kept, every_steps=4, stop_after_s=0.0))
    assert (record["finished"], record["num_steps_done"], record["num_steps"]) == (False, 1, 6)
    assert any(f"stopped after 1 of 6 steps; run the same command again to go on from {kept}" in m for m in messages)
    serving = tiny.target(kernels=TorchKernels(torch.float32), norm_offset=1.0)
    load_drafter(tmp_path / "parts" / "tiny", serving, target_name="tiny", context_length=32)

    with monkeypatch.context() as patched:
        losses, accumulate = [0], Trainer.accumulate

        def lose_the_machine(self: Trainer, *given: Any, **named: Any) -> BlockLoss:
            losses[0] += 1
            if losses[0] == 4:
                raise KeyboardInterrupt
            return accumulate(self, *given, **named)

        patched.setattr(Trainer, "accumulate", lose_the_machine)
        with pytest.raises(KeyboardInterrupt):
            call("parts", CheckpointOptions(file=kept, every_steps=2))

    last, messages = call("parts", CheckpointOptions(file=kept, every_steps=2))
    assert any("going on after 3 of 6 steps" in message for message in messages)
    whole, _ = call("whole", None)
    assert last["finished"] is whole["finished"] is True
    assert last["log"] == whole["log"]
    assert last["held_out"] == whole["held_out"]
    assert last["train_seconds"] > record["train_seconds"] > 0.0
    weights = [load_file(tmp_path / out / "tiny" / "model.safetensors") for out in ("parts", "whole")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_a_loss_that_is_not_finite_leaves_the_last_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe, keeping = tiny.recipe(optimize={"num_steps": 6}), CheckpointOptions(file=tmp_path / "run.pt", every_steps=2)
    accumulate, calls = Trainer.accumulate, [0]

    def spoilt(self: Trainer, *given: Any, **named: Any) -> BlockLoss:
        calls[0] += 1
        result = accumulate(self, *given, **named)
        return replace(result, loss=result.loss / 0.0) if calls[0] == 4 else result

    monkeypatch.setattr(Trainer, "accumulate", spoilt)
    with pytest.raises(ConfigError, match="tiny: the loss of step 3 is not finite"):
        train_drafters(
            run / "target",
            [recipe],
            run / "data.pt",
            tmp_path / "out",
            device=CPU,
            progress=lambda line: None,
            options=RunOptions(keeping=keeping),
        )
    assert torch.load(keeping.file, weights_only=True)["num_steps_done"] == 2
    assert not (tmp_path / "out").exists()
