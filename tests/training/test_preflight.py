"""What is counted is what is held; what is timed is what steps take; too little room stops a run before it begins."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.errors import ConfigError
from outrider.training import preflight
from outrider.training.capture import GridRunner
from outrider.training.config import Recipe
from outrider.training.dataset import BlockDataset
from outrider.training.head_loss import HeadRows, head_loss
from outrider.training.loop import TrainingRun, take_step
from outrider.training.preflight import Preflight, check_room, chunk_bytes, count, kept_bytes, rehearse
from tests.training import tiny

WIDE = {"max_anchors": 16, "num_steps": 100}
DEEPSPECS = {
    "layer_style": "Gemma 4",
    "full_attention_layers": (0, 1),
    "sliding_window": 0,
    "draft_vocab_size": tiny.VOCAB,
}


def ready(recipe: Recipe) -> tuple[TrainingRun, GridRunner, BlockDataset]:
    trainer = tiny.trainer(recipe)
    dataset = BlockDataset([tiny.text(8)], num_held_out=2, seed=1)
    runner = GridRunner(trainer.target, num_sequences=4, num_positions=20)
    return TrainingRun({recipe.name: trainer}), runner, dataset


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(tiny.recipe(optimize=WIDE), id="DFlash"),
        pytest.param(tiny.recipe(drafter={"intermediate_size": 512, "block_size": 8}, optimize=WIDE), id="wide"),
        pytest.param(tiny.dspark_recipe(drafter=DEEPSPECS, optimize=WIDE), id="DSpark, Gemma 4"),
    ],
)
def test_what_a_step_keeps_is_counted_within_a_tenth(recipe: Recipe) -> None:
    """Against the storages that autograd really saves, weights and frozen tables apart."""
    run, runner, dataset = ready(recipe)
    (trainer,) = run.trainers.values()
    held = {each.untyped_storage().data_ptr() for each in (*trainer.model.parameters(), *trainer.model.buffers())}
    held |= {trainer.head.matrix.untyped_storage().data_ptr()}
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        take_step(run, runner, dataset.text(0, num_sequences=4), 0)
        found = sum(each.untyped_storage().nbytes() for where, each in kept.items() if where not in held)
    assert kept_bytes(trainer, runner) == pytest.approx(found, rel=0.1)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set[int]()

    def _drop(self, key: int, num_bytes: int) -> None:
        self.live -= num_bytes
        self.seen.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and (key := (storage := each.untyped_storage())._cdata) not in self.seen:
                self.seen.add(key)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._drop, key, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result


TEACHING = ({}, {"distillation_weight": 1.0}, {"probability_l1_weight": 1.0})


@pytest.mark.parametrize(
    "losses", [*TEACHING, {**TEACHING[1], **TEACHING[2]}], ids=lambda each: "+".join(each) or "none"
)
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_a_chunk_of_logits_takes_what_is_counted(losses: dict[str, float], cap: float) -> None:
    shape = {"draft_vocab_size": tiny.VOCAB, "final_logit_softcapping": cap, "block_size": 9}
    run, runner, _ = ready(tiny.recipe(drafter=shape, optimize={**WIDE, **losses}))
    (trainer,) = run.trainers.values()
    num_rows, options = 4 * 16 * 8, trainer.recipe.optimize
    hidden = torch.randn(num_rows, tiny.HIDDEN, requires_grad=True)
    ids, ones = torch.zeros(num_rows, 1, dtype=torch.int64), torch.ones(num_rows, 1)
    head = replace(trainer.head, teacher_cap=None)
    rows = HeadRows(ids, ones, ones[:, 0], hidden.detach() if options.needs_teacher else None)
    with LiveBytes() as seen:
        head_loss(head, rows, options, hidden, None, None)
    small = 3 * hidden.nbytes  # its gradients, and numbers a row
    assert chunk_bytes(trainer, runner) <= seen.peak <= chunk_bytes(trainer, runner) + small


def test_weights_states_text_and_files_are_counted() -> None:
    run, runner, dataset = ready(tiny.recipe())
    (trainer,) = run.trainers.values()
    counted = count(run, runner, dataset)
    take_step(run, runner, dataset.text(0, num_sequences=4), 0)
    moments = [each for state in trainer.optimizers[0].state.values() for each in state.values() if each.dim()]
    weights = sum(each.nbytes for each in trainer.model.parameters())
    assert counted.memory_bytes["optimiser"] == sum(each.nbytes for each in moments) == 2 * weights
    assert counted.memory_bytes["drafters"] == weights + trainer.head.matrix.nbytes
    assert counted.memory_bytes["gradients"] == weights
    assert counted.memory_bytes["taps"] == 4 * 20 * 2 * tiny.HIDDEN * 4
    assert counted.memory_bytes["text"] == 8 * 20 * 4 + 2 * 8 * 4
    assert counted.memory_bytes["target"] > trainer.target.embedding.nbytes
    assert counted.peak_bytes == sum(counted.memory_bytes.values())
    assert sum(counted.disk_bytes.values()) == pytest.approx(2 * 3 * weights + weights / 4, rel=0.02)


def test_a_full_vocabulary_shares_the_targets_table() -> None:
    run, runner, dataset = ready(tiny.recipe(drafter={"draft_vocab_size": tiny.VOCAB}))
    (trainer,) = run.trainers.values()
    assert trainer.head.matrix is trainer.target.embedding
    assert count(run, runner, dataset).memory_bytes["drafters"] == sum(e.nbytes for e in trainer.model.parameters())


def test_time_is_that_of_whole_and_short_blocks_as_often_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    run, runner, dataset = ready(tiny.recipe(optimize={"num_steps": 100, "full_block_every_steps": 4}))
    clock, steps, real = [0.0], list[int](), preflight.take_step

    def timed(run: TrainingRun, runner: GridRunner, text: Any, step: int) -> Any:
        steps.append(step)
        clock[0] += 8.0 if step == 0 else 2.0
        return real(run, runner, text, step)

    monkeypatch.setattr(preflight, "take_step", timed)
    monkeypatch.setattr(preflight.time, "perf_counter", lambda: clock[0])
    found = rehearse(run, runner, dataset, count(run, runner, dataset))
    assert found.seconds == pytest.approx(100 * (8.0 / 4 + 2.0 * 3 / 4))
    assert steps == [0, 0, 1]
    assert found.lines()[-1] == "time: 5.8 min of steps, text and held-out figures apart"
    assert found.measured_peak_bytes is None


class Usage(NamedTuple):
    free: int


def test_a_disk_without_room_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted = Preflight({}, 0, {"checkpoint": 3 * 2**30})
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: Usage(2 * 2**30))
    with pytest.raises(ConfigError, match=r"has 2.00 GiB of room, and this run writes up to 3.00. Make room"):
        check_room(counted, [tmp_path], torch.device("cpu"), say=lambda line: None)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: Usage(3 * 2**30))
    check_room(counted, [tmp_path], torch.device("cpu"), say=lambda line: None)
