"""Steps: texts in, the target's taps, every drafter's share, and what is said about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.training.capture import GridRunner, Taps
from outrider.training.config import OptimizeConfig, Recipe
from outrider.training.dataset import BlockDataset
from outrider.training.generate import TextBatch
from outrider.training.losses import BlockLoss
from outrider.training.parallel import ALONE, Ranks
from outrider.training.trainer import Trainer

LOG_EVERY_STEPS = 100
Progress = Callable[[str], None]
Scalars = Callable[[str, int, dict[str, float]], None]
"""Told a drafter's name, a step, and its figures."""


@dataclass
class TrainingRun:
    """Drafters trained side by side, and how far they are."""

    trainers: dict[str, Trainer]
    num_micro_batches: int = 1  # a step's texts are taken in so many parts by each process
    ranks: Ranks = ALONE
    scalars: Scalars | None = None
    num_steps_done: int = 0
    seconds: float = 0.0  # spent in `train`, over all calls
    logs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by drafter: a row every LOG_EVERY_STEPS

    @property
    def options(self) -> OptimizeConfig:
        """Of the first recipe; what is read here is the same in all."""
        return next(iter(self.trainers.values())).recipe.optimize

    @property
    def is_finished(self) -> bool:
        """True once every step is done."""
        return self.num_steps_done >= self.options.num_steps

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target layers that any of the drafters' training reads."""
        first = next(iter(self.trainers.values()))
        recipes = [trainer.recipe for trainer in self.trainers.values()]
        return all_tap_layers(recipes, num_target_layers=len(first.target.config.layers))


def train(
    run: TrainingRun,
    runner: GridRunner,
    dataset: BlockDataset,
    *,
    until_step: int,
    deadline_s: float = math.inf,
    progress: Progress,
) -> None:
    """Fit every drafter on the same texts, in step; the target runs once a step for all of them.

    Goes on to `until_step`, or to the first step that ends after `deadline_s` (a time of `time.perf_counter`).
    """
    losses: dict[str, list[Tensor]] = {name: [] for name in run.trainers}
    seconds_before, started, num_before = run.seconds, time.perf_counter(), run.num_steps_done
    for step in range(num_before, until_step):
        text = dataset.text(step, num_sequences=run.options.batch_sequences)
        results = take_step(run, runner, text, step)
        for name, result in results.items():
            losses[name].append(result.loss)
        run.num_steps_done = step + 1
        if step % LOG_EVERY_STEPS == 0 or step == run.options.num_steps - 1:
            _check_finite(run, losses)
            run.seconds = seconds_before + time.perf_counter() - started
            _log(run, text, results, progress=progress)
        if deadline_s < math.inf and run.ranks.any(time.perf_counter() >= deadline_s, runner.target.device):
            break
    _check_finite(run, losses)
    run.seconds = seconds_before + time.perf_counter() - started


def take_step(run: TrainingRun, runner: GridRunner, text: TextBatch, step: int) -> dict[str, BlockLoss]:
    """One step of every drafter over a step's texts, of which this process takes its share in micro-batches.

    Losses are averaged over the weights of the whole step: the cut changes nothing but the order of sums (T-073 a).
    """
    parts = run.ranks.shares(len(text.token_ids), run.num_micro_batches)
    texts = [text.take(part) for part in parts]
    batches = {
        name: [trainer.blocks(each, step, first_row=part.start) for each, part in zip(texts, parts, strict=True)]
        for name, trainer in run.trainers.items()
    }
    totals = {
        name: torch.stack([trainer.slot_weights(batch).sum() for batch in batches[name]]).sum()
        for name, trainer in run.trainers.items()
    }
    run.ranks.add_up(list(totals.values()))
    shares: dict[str, list[BlockLoss]] = {name: [] for name in run.trainers}
    for index, each in enumerate(texts):
        taps = read_taps(runner, each, run.tap_layers)
        for name, trainer in run.trainers.items():
            shares[name].append(trainer.accumulate(taps, batches[name][index], total_weight=totals[name]))
    results = {name: reduce(add, found) for name, found in shares.items()}
    for name, trainer in run.trainers.items():
        trainer.update(results[name], run.ranks)
    return results


@torch.no_grad()
def read_taps(runner: GridRunner, text: TextBatch, layers: tuple[int, ...]) -> Taps:
    """The target's outputs over texts: those kept with them, or from a pass."""
    kept = text.taps
    values = runner.taps(text.token_ids, layers) if kept is None else kept.to(runner.target.dtype)
    return Taps(values, layers)


def all_tap_layers(recipes: Sequence[Recipe], *, num_target_layers: int) -> tuple[int, ...]:
    """The target layers that training of any recipe reads, ascending: the order of taps kept with a text."""
    return tuple(sorted({layer for recipe in recipes for layer in recipe.tap_layers(num_target_layers)}))


def _log(run: TrainingRun, text: TextBatch, results: dict[str, BlockLoss], *, progress: Progress) -> None:
    step, num_steps, kind = run.num_steps_done - 1, run.options.num_steps, text.kind.value
    left_s = (num_steps - run.num_steps_done) * run.seconds / run.num_steps_done
    pace = f"{run.num_steps_done / run.seconds:.1f} steps/s, {left_s:.0f} s left"
    for name, result in results.items():
        loss, slots = result.loss.item(), result.acceptance_by_slot.tolist()
        rows = run.logs.setdefault(name, [])
        rows.append({"step": step, "kind": kind, "loss": loss, "acceptance_by_slot": slots})
        progress(f"step {step}/{num_steps} {name} {kind} loss {loss:.3f}, {pace}")
        if run.scalars is not None:
            rate = float(run.trainers[name].schedules[0].get_last_lr()[0])
            figures: dict[str, float] = {f"acceptance/slot_{slot}": chance for slot, chance in enumerate(slots, 1)}
            run.scalars(name, step, {f"loss/{kind}": loss, "learning_rate": rate, **figures})


def _check_finite(run: TrainingRun, losses: dict[str, list[Tensor]]) -> None:
    """Raise if a loss since `train` began, or a weight now, is not finite; not every step, for it waits for the GPU."""
    for name, trainer in run.trainers.items():
        is_sound = torch.stack(losses[name]).isfinite().tolist()
        step = run.num_steps_done - 1
        what = "the weights after"
        if not all(is_sound):
            step += is_sound.index(False) + 1 - len(is_sound)
            what = "the loss of"
        elif all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters()):
            continue
        raise ConfigError(
            f"{name}: {what} step {step} is not finite. Start again with a lower learning_rate or clip_norm; "
            "checkpoints and drafters written before are untouched."
        )
