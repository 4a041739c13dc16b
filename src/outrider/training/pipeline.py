"""A whole training run: text, drafter, held-out figures, file. What `outrider train` calls."""

from __future__ import annotations

import hashlib
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider import environment
from outrider.errors import ConfigError
from outrider.kernels.ops import select_kernels
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import load_target
from outrider.tokenizer import Tokenizer
from outrider.training.capture import GridKernels, GridRunner
from outrider.training.checkpoint import CheckpointOptions, resume, write_checkpoint
from outrider.training.config import Recipe
from outrider.training.dataset import BlockDataset
from outrider.training.export import export_drafter
from outrider.training.files import write_whole
from outrider.training.generate import TextBatch, TextKind, generate_text
from outrider.training.loop import Scalars, TrainingRun, all_tap_layers, train
from outrider.training.openings import draw_openings
from outrider.training.parallel import ALONE, Ranks
from outrider.training.preflight import Preflight, check_room, count
from outrider.training.selection import evaluate_greedy, evaluate_sampled
from outrider.training.trainer import Trainer
from outrider.training.warm_start import load_warm_start
from outrider.weights.loader import Checkpoint, load_checkpoint
from outrider.weights.locate import locate_drafter

Progress = Callable[[str], None]


def open_target(path: Path, recipe: Recipe, *, device: torch.device) -> tuple[Checkpoint, GemmaTarget]:
    """The target for training: bf16 and whole-grid kernels on a GPU, else float32 and the machine's own kernels."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    is_cuda = device.type == "cuda"
    checkpoint = load_checkpoint(path)
    target = load_target(
        checkpoint,
        kernels=GridKernels(dtype, device) if is_cuda else select_kernels("auto", dtype=dtype, device=device),
        dtype=dtype,
        device=device,
        context_length=recipe.generate.sequence_tokens,
    )
    return checkpoint, target


def make_text(path: Path, recipe: Recipe, data: Path, *, device: torch.device, progress: Progress) -> dict[str, Any]:
    """Let the target write the recipe's text and save it to the file `data`; returns what is worth recording."""
    checkpoint, target = open_target(path, recipe, device=device)
    options, started = recipe.generate, time.perf_counter()
    num_layers = len(target.config.layers)
    layers = all_tap_layers([recipe], num_target_layers=num_layers) if options.keep_taps else ()
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_path)
    runner = GridRunner(target, num_sequences=options.batch_sequences, num_positions=options.sequence_tokens)
    batches, categories = generate_text(
        runner,
        tokenizer,
        options,
        source=draw_openings,
        end_token_ids=target.config.eos_token_ids,
        progress=progress,
        tap_layers=layers,
    )
    facts = {
        "target_sha256": checkpoint.sha256(),
        "tokenizer_sha256": _tokenizer_sha256(checkpoint),
        "num_tokens": sum(int(batch.num_valid.sum()) for batch in batches),
        "openings_by_category": categories,
        "seconds": time.perf_counter() - started,
        "generate": asdict(options),
        "tap_layers": list(layers),
    }
    write_text(data, facts, batches)
    return facts


def write_text(data: Path, facts: dict[str, Any], batches: list[TextBatch]) -> None:
    """Save a text and what is worth recording of it, whole or not at all, for `read_text`."""
    write_whole(data, lambda file: torch.save({"facts": facts, "batches": batches}, file), what="text")


def read_text(data: Path, *, device: torch.device) -> tuple[dict[str, Any], list[TextBatch]]:
    """What `make_text` saved."""
    try:
        with torch.serialization.safe_globals([TextBatch, TextKind]):
            saved = torch.load(data, map_location=device, weights_only=True)
        return saved["facts"], saved["batches"]
    except (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        state = "holds no text of" if data.is_file() else "does not exist. It is made by"
        raise ConfigError(
            f"{data} {state} `outrider train generate`. Name its --data file. ({type(error).__name__})"
        ) from error


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is carried out; nothing here changes what is trained, but for the order of sums."""

    keeping: CheckpointOptions | None = None
    num_micro_batches: int = 1
    ranks: Ranks = ALONE
    scalars: Scalars | None = None
    chat_sha256: Callable[[], str] | None = None  # of the target's chat template, asked where the text is made of chats


@dataclass(frozen=True)
class Prepared:
    """A run that is set up and has not begun."""

    run: TrainingRun
    runner: GridRunner
    dataset: BlockDataset
    facts: dict[str, Any]  # what the text's file says of itself

    def preflight(self) -> Preflight:
        """What it will take, counted."""
        return count(self.run, self.runner, self.dataset)


def prepare(path: Path, recipes: list[Recipe], data: Path, *, device: torch.device, options: RunOptions) -> Prepared:
    """Read text, target and what recipes start from; ConfigError where they do not go together."""
    _check_alike(recipes)
    facts, batches = read_text(data, device=device)
    checkpoint, target = open_target(path, recipes[0], device=device)
    _check_text(facts, batches, checkpoint, recipes, data)
    _check_template(facts, options, data)
    if batches[0].taps is not None:
        _check_kept_taps(facts, recipes, data, num_target_layers=len(target.config.layers))
    fitted = recipes[0].optimize
    parts = options.ranks.shares(fitted.batch_sequences, options.num_micro_batches)
    dataset = BlockDataset(batches, num_held_out=fitted.num_held_out_sequences, seed=fitted.seed)
    run = TrainingRun(
        make_trainers(recipes, target, dataset),
        num_micro_batches=options.num_micro_batches,
        ranks=options.ranks,
        scalars=options.scalars,
    )
    num_sequences, num_positions = parts[0].stop - parts[0].start, recipes[0].generate.sequence_tokens
    return Prepared(run, GridRunner(target, num_sequences=num_sequences, num_positions=num_positions), dataset, facts)


def train_drafters(
    path: Path,
    recipes: list[Recipe],
    data: Path,
    out: Path,
    *,
    device: torch.device,
    progress: Progress,
    options: RunOptions | None = None,
) -> dict[str, dict[str, Any]]:
    """Train one drafter a recipe on the same text and export each to out/<name>; returns their records.

    All recipes share batches and target passes, so they are compared on equal terms; [generate] and the batch size,
    steps and seed of [optimize] must therefore agree. With `options.keeping` the run goes on from its checkpoint, and
    may stop early: what is exported then is the drafter so far. Of several processes the first writes and returns.
    """
    options = options or RunOptions()
    ready = prepare(path, recipes, data, device=device, options=options)
    counted = ready.preflight()
    for line in counted.lines():
        progress(line)
    folders = [out] if options.keeping is None else [out, options.keeping.file.parent]
    check_room(counted, [each for each in folders if each.is_dir()], device, say=progress)
    train_and_keep(ready.run, ready.runner, ready.dataset, ready.facts, keeping=options.keeping, progress=progress)
    if not ready.run.ranks.is_first:
        return {}
    return export_all(ready.run, ready.dataset, ready.facts, out, progress=progress)


def make_trainers(recipes: list[Recipe], target: GemmaTarget, dataset: BlockDataset) -> dict[str, Trainer]:
    """A trainer a recipe, by name, each from where its recipe starts."""
    counts = dataset.token_counts(target.config.vocab_size)
    trainers = {}
    for recipe in recipes:
        start = None
        if recipe.warm_start:
            declared = recipe.drafter.declared(target.config, name=recipe.name, num_speculative_tokens=1)
            start = load_warm_start(locate_drafter(recipe.warm_start), declared, target)
        trainers[recipe.name] = Trainer(recipe, target, counts, start=start)
    return trainers


def export_all(
    run: TrainingRun, dataset: BlockDataset, facts: dict[str, Any], out: Path, *, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Write every drafter with its record; returns the records."""
    records = {}
    for name, trainer in run.trainers.items():
        record = training_record(run, name, dataset, facts)
        export_drafter(trainer, out / name, record=record)
        records[name] = record
        progress(f"{name}: {record['held_out']}")
    return records


def train_and_keep(
    run: TrainingRun,
    runner: GridRunner,
    dataset: BlockDataset,
    facts: dict[str, Any],
    *,
    keeping: CheckpointOptions | None,
    progress: Progress,
) -> None:
    """Train from where the checkpoint left off, write it every so often, and stop when `keeping` says so."""
    num_steps = run.options.num_steps
    if keeping is None:
        train(run, runner, dataset, until_step=num_steps, progress=progress)
        return
    if keeping.file.exists():
        resume(keeping.file, run, text=facts)
        progress(f"{keeping.file}: going on after {run.num_steps_done} of {num_steps} steps")
    deadline_s = time.perf_counter() + (math.inf if keeping.stop_after_s is None else keeping.stop_after_s)
    while not run.is_finished:
        until_step = min(num_steps, run.num_steps_done + keeping.every_steps)
        train(run, runner, dataset, until_step=until_step, deadline_s=deadline_s, progress=progress)
        if run.ranks.is_first:
            write_checkpoint(keeping.file, run, text=facts)
        if run.num_steps_done < until_step:  # the clock, which all processes asked together
            break
    if not run.is_finished:
        progress(
            f"stopped after {run.num_steps_done} of {num_steps} steps; run the same command again to go on from "
            f"{keeping.file}"
        )


def training_record(run: TrainingRun, name: str, dataset: BlockDataset, facts: dict[str, Any]) -> dict[str, Any]:
    """Recipe, text, progress, loss and held-out figures, with the environment they were made in."""
    trainer = run.trainers[name]
    return {
        "schema": 1,
        "recipe": asdict(trainer.recipe),
        "text": facts,
        "num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "num_steps": run.options.num_steps,
        "num_steps_done": run.num_steps_done,
        "finished": run.is_finished,
        "num_processes": run.ranks.count,
        "num_micro_batches": run.num_micro_batches,
        "train_seconds": run.seconds,
        "log": run.logs[name],
        "held_out": held_out_figures(trainer, dataset),
        "environment": environment.describe(),
    }


def held_out_figures(trainer: Trainer, dataset: BlockDataset) -> dict[str, Any]:
    """Simulated cycles on text that was not trained on."""
    positions = trainer.recipe.generate.sequence_tokens
    runner = GridRunner(trainer.target, num_sequences=8, num_positions=positions)
    trainer.model.eval()
    figures: dict[str, Any] = {}
    for pool in dataset.pools:
        text = dataset.held_out(pool.kind)
        if pool.kind is TextKind.GREEDY:
            figures["greedy"] = [walked.summary() for walked in evaluate_greedy(trainer, runner, text)]
        else:
            figures[pool.kind.value] = evaluate_sampled(trainer, runner, text)
    return figures


def _check_alike(recipes: list[Recipe]) -> None:
    def shared(recipe: Recipe) -> tuple[Any, ...]:
        options = recipe.optimize
        sizes = (options.num_steps, options.batch_sequences, options.num_held_out_sequences)
        return (recipe.generate, options.seed, sizes)

    if len({shared(recipe) for recipe in recipes}) != 1 or len({recipe.name for recipe in recipes}) != len(recipes):
        raise ConfigError(
            "recipes trained together must have different names and the same [generate], num_steps, batch_sequences, "
            "num_held_out_sequences and seed."
        )


def _tokenizer_sha256(checkpoint: Checkpoint) -> str:
    return hashlib.sha256(checkpoint.tokenizer_path.read_bytes()).hexdigest()


def _check_text(
    facts: dict[str, Any], batches: list[TextBatch], checkpoint: Checkpoint, recipes: list[Recipe], data: Path
) -> None:
    """Refuse text that this target did not write, or that these recipes do not read."""
    if facts["target_sha256"] != checkpoint.sha256():
        raise ConfigError(f"{data} was written by another target ({facts['target_sha256'][:12]}). Generate it again.")
    there = facts.get("tokenizer_sha256")  # text of earlier versions does not say
    if there is not None and there != _tokenizer_sha256(checkpoint):
        raise ConfigError(
            f"{data} was made with another tokenizer ({there[:12]}) than {checkpoint.tokenizer_path}. Put back the "
            "target's own tokenizer.json, or generate the text again."
        )
    there, here = batches[0].token_ids.shape[1], recipes[0].generate.sequence_tokens
    if there != here:
        raise ConfigError(
            f"{data} has sequences of {there} tokens, but the recipe's sequence_tokens is {here}. Use the recipe that "
            "the text was made with, or generate it again."
        )
    if not any(bool((batch.first_label < batch.num_valid).any()) for batch in batches):
        raise ConfigError(f"{data}: no sequence has an answer to train on. Generate text with longer sequence_tokens.")


def _check_template(facts: dict[str, Any], options: RunOptions, data: Path) -> None:
    there = facts.get("chat_template_sha256")
    if there is not None and options.chat_sha256 is not None and there != options.chat_sha256():
        raise ConfigError(
            f"{data} holds chats written with another template than the target's now, so the drafter would learn texts "
            "that serving never sees. Put the template back, or generate the text again."
        )


def _check_kept_taps(facts: dict[str, Any], recipes: list[Recipe], data: Path, *, num_target_layers: int) -> None:
    wanted = list(all_tap_layers(recipes, num_target_layers=num_target_layers))
    kept = facts.get("tap_layers")
    if kept != wanted:
        raise ConfigError(f"{data} holds taps of layers {kept}, but the recipes read {wanted}. Generate it again.")
