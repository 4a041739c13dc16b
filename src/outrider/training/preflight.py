"""What a run will take: memory and disk by counting, time by a few steps that are thrown away."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.backends.account import held_bytes
from outrider.errors import ConfigError
from outrider.models.drafter_config import LayerStyle
from outrider.training.capture import GridRunner
from outrider.training.dataset import BlockDataset
from outrider.training.drafter import ROWS_AT_A_TIME
from outrider.training.head_loss import CHUNK_LOGITS
from outrider.training.loop import TrainingRun, take_step
from outrider.training.trainer import Trainer

GIB = 2**30
_STATE_BYTES = {"adamw": 8, "adamw8bit": 2.04, "muon": 4}  # of an optimiser, a weight; 8 bits with a scale for 256
_EXPORT_BYTES = 1.07  # of a weight in int8 with a float16 scale for 32
_WARM_UP_STEPS = 1


@dataclass(frozen=True)
class Preflight:
    """Bytes by what takes them, and seconds of all steps; `peak` is the most that is held at one time."""

    memory_bytes: dict[str, int]
    peak_bytes: int
    disk_bytes: dict[str, int]
    seconds: float | None = None
    """None until some steps were timed."""
    measured_peak_bytes: int | None = None
    """Of those steps; None but on CUDA."""

    def lines(self) -> list[str]:
        """For people."""
        memory = ", ".join(f"{what} {size / GIB:.2f}" for what, size in self.memory_bytes.items())
        disk = ", ".join(f"{what} {size / GIB:.2f}" for what, size in self.disk_bytes.items())
        found = [f"memory: {self.peak_bytes / GIB:.2f} GiB at most ({memory})", f"disk: {disk} GiB"]
        if self.measured_peak_bytes is not None:
            found.append(f"memory measured over a few steps: {self.measured_peak_bytes / GIB:.2f} GiB")
        if self.seconds is not None:
            found.append(f"time: {self.seconds / 60:.1f} min of steps, text and held-out figures apart")
        return found

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def count(run: TrainingRun, runner: GridRunner, dataset: BlockDataset) -> Preflight:
    """Bytes of a run that was set up and has not begun, in each process."""
    trainers = list(run.trainers.values())
    num_weights = {
        name: sum(each.numel() for each in trainer.model.parameters()) for name, trainer in run.trainers.items()
    }
    states = sum(
        int(size * _STATE_BYTES[run.trainers[name].recipe.optimize.optimizer]) for name, size in num_weights.items()
    )
    weights = 4 * sum(num_weights.values())
    heads = {each.head.matrix.data_ptr(): each.head.matrix.nbytes for each in trainers}
    heads.pop(_pointer(runner.target.embedding), None)  # a full vocabulary's is the target's own table
    taps = runner.num_sequences * runner.num_positions * len(run.tap_layers) * _row_bytes(runner)
    memory = {
        "target": held_bytes(runner.target),
        "caches": sum(cache.keys.nbytes + cache.values.nbytes for cache in runner.caches),
        "text": held_bytes(*dataset.pools),
        "drafters": weights + sum(heads.values()),
        "gradients": weights,
        "optimiser": states,
        "taps": taps,
        "step": max(
            target_pass_bytes(runner), *(kept_bytes(each, runner) + chunk_bytes(each, runner) for each in trainers)
        ),
    }
    disk = {"checkpoint, twice while one replaces another": 2 * (weights + states)}
    disk["drafters"] = int(_EXPORT_BYTES * sum(num_weights.values()))
    return Preflight(memory, sum(memory.values()), disk)


def target_pass_bytes(runner: GridRunner) -> int:
    """What the target's pass over one micro-batch holds beside its caches: a few tensors of a layer."""
    config, rows = runner.target.config, runner.num_sequences * runner.num_positions
    widest = max(spec.mlp_multiple for spec in config.layers) * config.intermediate_size
    numbers = 3 * config.hidden_size + 3 * widest
    return rows * (numbers * runner.target.dtype.itemsize + 4 * config.hidden_size)


def kept_bytes(trainer: Trainer, runner: GridRunner) -> int:
    """What a drafter's forward keeps for backward over one micro-batch of whole blocks.

    b bytes a number (2 under autocast), R block rows, C context rows, N hidden, Q and K query and key sizes, I inner:
    a layer keeps both norms' inputs in float32 and outputs, all its projections' inputs, rotated queries, keys and
    values of all heads (context once a call of attention), and the MLP's four parts; Gemma 4's also two more norms'
    inputs, the scalar's, and the values before their norm.
    """
    config, options = trainer.config, trainer.recipe.optimize
    width = runner.target.dtype.itemsize
    num_anchors = min(options.max_anchors, runner.num_positions)
    block = config.layout.num_slots(config.max_draft_length)
    rows, context = runner.num_sequences * num_anchors * block, runner.num_sequences * runner.num_positions
    calls = math.ceil(num_anchors / max(1, ROWS_AT_A_TIME // block))
    size, inner, kept = config.hidden_size, config.intermediate_size, 0
    for spec in config.layers:
        queries, keys = config.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        kept += 2 * rows * size * (4 + width) + (context + rows) * size * width
        kept += rows * queries * (4 + 3 * width) + (context + rows) * keys * 4
        kept += 2 * (calls * context + rows) * queries * width + 4 * rows * inner * width
        kept += rows * (runner.num_positions + min(rows, ROWS_AT_A_TIME)) * width  # the mask, as numbers
        if config.style is LayerStyle.GEMMA4:
            kept += rows * size * (8 + width) + (context + rows) * keys * 4
    kept += rows * size * (4 + 3 * width) + context * size * (4 + width)
    drafts = runner.num_sequences * num_anchors * config.max_draft_length
    if options.needs_teacher:
        kept += drafts * size * width
    if config.markov is not None:
        kept += drafts * config.markov.rank * 3 * width + config.draft_vocab_size * config.markov.rank * (4 + width)
    if config.confidence is not None:
        kept += drafts * 4 * (size + (config.markov.rank if config.markov else 0))
    if width == 2:
        kept += 2 * sum(each.numel() for each in trainer.model.parameters())  # autocast's copies
    return kept


def chunk_bytes(trainer: Trainer, runner: GridRunner) -> int:
    """The most that a chunk of logits and what is made of them take, in `head_loss`, by the losses asked for."""
    config, options, width = trainer.config, trainer.recipe.optimize, trainer.head.matrix.dtype.itemsize
    asked = (options.distillation_weight > 0) + (options.probability_l1_weight > 0)
    each = (12 + 2 * width, 20 + width, 24 + width)[asked] + (width if config.final_logit_softcapping else 0)
    num_anchors = min(options.max_anchors, runner.num_positions)
    drafts = runner.num_sequences * num_anchors * config.max_draft_length
    return each * min(CHUNK_LOGITS, drafts * config.draft_vocab_size)


def rehearse(run: TrainingRun, runner: GridRunner, dataset: BlockDataset, counted: Preflight) -> Preflight:
    """Take a few steps, whole blocks and short ones, and say how long all will take; the run is spoilt by it."""
    device, options = runner.target.device, run.options
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds: dict[bool, float] = {}
    kinds = [0] * _WARM_UP_STEPS + [0] + ([1] if options.full_block_every_steps > 1 else [])
    for step in kinds:
        started = time.perf_counter()
        text = dataset.text(step, num_sequences=options.batch_sequences)
        for result in take_step(run, runner, text, step).values():
            result.loss.item()  # waits for the device
        seconds[step == 0] = time.perf_counter() - started
    whole = 1.0 / options.full_block_every_steps
    mean = whole * seconds[True] + (1.0 - whole) * seconds.get(False, 0.0)
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else None
    found = {**asdict(counted), "seconds": mean * options.num_steps, "measured_peak_bytes": peak}
    return Preflight(**found)


def check_room(counted: Preflight, folders: list[Path], device: torch.device, *, say: Callable[[str], None]) -> None:
    """ConfigError if a disk that is written to has too little room; a warning if memory looks too small."""
    needed = sum(counted.disk_bytes.values())
    for folder in folders:
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise ConfigError(
                f"{folder} has {free / GIB:.2f} GiB of room, and this run writes up to {needed / GIB:.2f}. Make room, "
                "or name another folder."
            )
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if counted.peak_bytes > total:
            say(
                f"warning: about {counted.peak_bytes / GIB:.1f} GiB are needed, the device has {total / GIB:.1f}. "
                "More --micro-batches or processes, fewer max_anchors, or optimizer adamw8bit need less."
            )


def _row_bytes(runner: GridRunner) -> int:
    return int(runner.target.config.hidden_size * runner.target.dtype.itemsize)


def _pointer(table: object) -> int:
    return table.data_ptr() if isinstance(table, torch.Tensor) else 0
