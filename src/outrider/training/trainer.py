"""Fitting one drafter to a target's own text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.kernels.reference import soft_cap
from outrider.models.dflash import select_rows
from outrider.models.gemma import GemmaTarget
from outrider.training.capture import GridRunner
from outrider.training.config import OptimizeConfig, Recipe
from outrider.training.dataset import (
    BlockBatch,
    BlockDataset,
    anchor_candidates,
    inside_repeats,
    make_blocks,
    sample_anchors,
    step_generator,
)
from outrider.training.drafter import TrainableDFlash
from outrider.training.generate import TextBatch
from outrider.training.losses import BlockLoss, block_loss

LOG_EVERY_STEPS = 100


def choose_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids, ascending, int64 [Vd]; ties go to the lower id."""
    if size >= len(counts):
        return torch.arange(len(counts), device=counts.device)
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


def learning_rate_factor(step: int, options: OptimizeConfig) -> float:
    """Linear warm-up, then half a cosine down to 0."""
    warmup = max(1, int(options.warmup_fraction * options.num_steps))
    return min((step + 1) / warmup, 0.5 * (1.0 + math.cos(math.pi * min(step / options.num_steps, 1.0))))


def make_optimizers(model: nn.Module, options: OptimizeConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for matrices (its step scaled to AdamW's size) and AdamW for norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    rate = options.learning_rate
    adamw: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.98), "weight_decay": 0.0}
    match options.optimizer:
        case "adamw":
            return [torch.optim.AdamW(model.parameters(), **adamw)]
        case "muon":
            muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            return [muon, torch.optim.AdamW(others, **adamw)]
    raise ConfigError(f"optimizer {options.optimizer!r} is not one of adamw, muon.")


class Trainer:
    """A drafter, its optimiser and its share of a step. Several can share one target pass."""

    def __init__(self, recipe: Recipe, target: GemmaTarget, token_counts: Tensor) -> None:
        options, shape = recipe.optimize, recipe.drafter
        last = len(target.config.layers) - 1
        if options.distillation_weight > 0 and last not in shape.target_layer_ids:
            raise ConfigError(f"{recipe.name}: distillation_weight needs layer {last} among target_layer_ids.")
        torch.manual_seed(options.seed)
        self.recipe, self.target, self.device = recipe, target, target.device
        self.model = TrainableDFlash(
            shape, hidden_size=target.config.hidden_size, max_positions=recipe.generate.sequence_tokens
        ).to(target.device)
        self.draft_to_target = choose_vocabulary(token_counts, shape.draft_vocab_size)
        self.target_to_draft = torch.full((target.config.vocab_size,), -1, dtype=torch.int64, device=target.device)
        self.target_to_draft[self.draft_to_target] = torch.arange(len(self.draft_to_target), device=target.device)
        # Frozen rows of the tied embedding, as numbers whatever kernels the target runs on.
        self.head = select_rows(target.stored_embedding, self.draft_to_target.cpu()).dequantize(
            target.dtype, target.device
        )
        self.optimizers = make_optimizers(self.model, options)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options))
            for optimizer in self.optimizers
        ]

    def blocks(self, text: TextBatch, step: int) -> BlockBatch:
        """Draw anchors, fewer inside repeats, and make their blocks; most steps train the first slots only."""
        options, block_size = self.recipe.optimize, self.recipe.drafter.block_size
        if step % options.full_block_every_steps:
            block_size = min(block_size, options.num_short_slots)
        weights = anchor_candidates(text).float()
        weights = torch.where(inside_repeats(text.token_ids), weights * options.repeat_anchor_weight, weights)
        generator = step_generator("anchors", seed=options.seed, step=step, device=self.device)
        anchors, real = sample_anchors(weights, options.max_anchors, generator)
        return make_blocks(text, anchors, real, block_size=block_size)

    def draft_logits(self, taps: Tensor, token_ids: Tensor, anchors: Tensor, *, block_size: int) -> Tensor:
        """Logits over the draft vocabulary, [S, A, B - 1, Vd], from taps [S, P, taps * N] and texts int64 [S, P]."""
        block = torch.full((*anchors.shape, block_size), self.recipe.drafter.mask_token_id, device=self.device)
        block[:, :, 0] = token_ids.gather(1, anchors)
        embeds = self.target.embed(block.flatten()).view(*block.shape, -1)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.target.dtype == torch.bfloat16):
            hidden = self.model(taps, anchors, embeds)
        return nn.functional.linear(hidden.to(self.head.dtype), self.head)

    @torch.no_grad()
    def teacher_probs(self, taps: Tensor, anchors: Tensor, *, num_labels: int) -> Tensor:
        """The target's distribution over draft ids at anchors + 1 .., [S, A, K', Vd], from its last layer."""
        size, last = self.target.config.hidden_size, len(self.target.config.layers) - 1
        column = self.recipe.drafter.target_layer_ids.index(last) * size
        before = anchors[:, :, None] + torch.arange(num_labels, device=self.device)
        sequence = torch.arange(len(anchors), device=self.device)[:, None, None]
        hidden = taps[sequence, before.clamp_max(taps.shape[1] - 1), column : column + size]
        norm, eps = self.target.final_norm, self.target.config.rms_norm_eps
        normed = nn.functional.rms_norm(hidden.float(), norm.shape, norm.float(), eps)
        logits = nn.functional.linear(normed.to(self.head.dtype), self.head).float()
        return soft_cap(logits, self.target.config.final_logit_softcapping).softmax(dim=-1)

    def distillation(self, logits: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
        """Weighted cross-entropy of draft logits [S, A, K', Vd] against the target's distribution, [S, A, K']."""
        probs = self.teacher_probs(taps, anchors, num_labels=logits.shape[2])
        entropy = nn.functional.cross_entropy(logits.float().flatten(0, 2), probs.flatten(0, 2), reduction="none")
        return self.recipe.optimize.distillation_weight * entropy.view(logits.shape[:3])

    def loss(self, taps: Tensor, batch: BlockBatch) -> BlockLoss:
        """Loss of one batch of blocks."""
        options = self.recipe.optimize
        block_size = batch.label_ids.shape[2] + 1
        logits = self.draft_logits(taps, batch.token_ids, batch.anchors, block_size=block_size)
        is_taught = options.distillation_weight > 0
        taught = self.distillation(logits, taps, batch.anchors).flatten(0, 1) if is_taught else None
        return block_loss(
            logits.flatten(0, 1),
            self.target_to_draft[batch.candidate_ids].flatten(0, 1),
            batch.candidate_probs.flatten(0, 1),
            batch.label_mask.flatten(0, 1),
            decay=options.position_decay,
            cross_entropy_weight=options.cross_entropy_weight,
            total_variation_weight=options.total_variation_weight,
            distillation=taught,
        )

    def step(self, taps: Tensor, batch: BlockBatch) -> BlockLoss:
        """One optimiser step."""
        result = self.loss(taps, batch)
        self.model.zero_grad(set_to_none=True)
        result.loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimize.clip_norm)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        return result

    def state_dict(self) -> dict[str, Any]:
        """All that steps change: float32 weights, optimisers, schedules."""
        return {key: [part.state_dict() for part in parts] for key, parts in self._stateful().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for key, parts in self._stateful().items():
            for part, saved in zip(parts, state[key], strict=True):
                part.load_state_dict(saved)

    def _stateful(self) -> dict[str, Sequence[Any]]:
        return {"model": [self.model], "optimizers": self.optimizers, "schedules": self.schedules}


@dataclass
class TrainingRun:
    """Drafters trained side by side, and how far they are."""

    trainers: dict[str, Trainer]
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


def train(
    run: TrainingRun,
    runner: GridRunner,
    dataset: BlockDataset,
    *,
    until_step: int,
    deadline_s: float = math.inf,
    progress: Callable[[str], None],
) -> None:
    """Fit every drafter on the same texts, in step; the target runs once a step for all of them.

    Goes on to `until_step`, or to the first step that ends after `deadline_s` (a time of `time.perf_counter`).
    """
    options, layers = run.options, all_tap_layers([trainer.recipe for trainer in run.trainers.values()])
    losses: dict[str, list[Tensor]] = {name: [] for name in run.trainers}
    seconds_before, started = run.seconds, time.perf_counter()
    for step in range(run.num_steps_done, until_step):
        text = dataset.text(step, num_sequences=options.batch_sequences)
        with torch.no_grad():
            taps = text.taps.to(runner.target.dtype) if text.taps is not None else runner.taps(text.token_ids, layers)
        results = {
            name: trainer.step(select_taps(taps, layers, trainer), trainer.blocks(text, step))
            for name, trainer in run.trainers.items()
        }
        for name, result in results.items():
            losses[name].append(result.loss.detach())
        run.num_steps_done = step + 1
        if step % LOG_EVERY_STEPS == 0 or step == options.num_steps - 1:
            _check_finite(run, losses)
            run.seconds = seconds_before + time.perf_counter() - started
            _log(run, text, results, progress=progress)
        if time.perf_counter() >= deadline_s:
            break
    _check_finite(run, losses)
    run.seconds = seconds_before + time.perf_counter() - started


def _log(run: TrainingRun, text: TextBatch, results: dict[str, BlockLoss], *, progress: Callable[[str], None]) -> None:
    step, num_steps, kind = run.num_steps_done - 1, run.options.num_steps, text.kind.value
    left_s = (num_steps - run.num_steps_done) * run.seconds / run.num_steps_done
    pace = f"{run.num_steps_done / run.seconds:.1f} steps/s, {left_s:.0f} s left"
    for name, result in results.items():
        loss, slots = result.loss.item(), result.acceptance_by_slot.tolist()
        rows = run.logs.setdefault(name, [])
        rows.append({"step": step, "kind": kind, "loss": loss, "acceptance_by_slot": slots})
        progress(f"step {step}/{num_steps} {name} {kind} loss {loss:.3f}, {pace}")


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


def all_tap_layers(recipes: Sequence[Recipe]) -> tuple[int, ...]:
    """The target layers that any of the recipes' drafters reads, ascending: the order of taps kept with a text."""
    return tuple(sorted({layer for recipe in recipes for layer in recipe.drafter.target_layer_ids}))


def select_taps(taps: Tensor, layers: tuple[int, ...], trainer: Trainer) -> Tensor:
    """The columns of taps [S, P, layers * N] that one trainer reads, in its own order."""
    size = trainer.target.config.hidden_size
    wanted = trainer.recipe.drafter.target_layer_ids
    if wanted == layers:
        return taps
    return torch.cat([taps[..., layers.index(i) * size : (layers.index(i) + 1) * size] for i in wanted], dim=-1)
