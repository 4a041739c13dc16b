"""Processes, micro-batches and one process alone take the same steps; a process with nothing to train on joins in."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.training import loop
from outrider.training.capture import GridRunner
from outrider.training.checkpoint import resume, write_checkpoint
from outrider.training.config import Recipe
from outrider.training.dataset import BlockDataset
from outrider.training.generate import TextBatch, TextKind
from outrider.training.loop import TrainingRun, train
from outrider.training.parallel import Ranks, launched_ranks
from tests.training import tiny

NUM_STEPS = 10
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def recipes() -> list[Recipe]:
    """One drafter of each kind, with warm-up, short and whole blocks."""
    options = {"num_steps": NUM_STEPS, "warmup_fraction": 0.4, "full_block_every_steps": 2, "clip_norm": 0.5}
    return [tiny.recipe(name="dflash", optimize=options), tiny.dspark_recipe(optimize=options)]


def texts() -> list[TextBatch]:
    """Sequences that no process may be able to train on: most have no answer."""
    batches = [tiny.text(10), tiny.text(10, kind=TextKind.SAMPLED, seed=1)]
    for batch in batches:
        batch.first_label[::2] = 99
    return batches


def run_steps(run: TrainingRun, until_step: int) -> None:
    dataset = BlockDataset(texts(), num_held_out=2, seed=1)
    part = run.ranks.shares(run.options.batch_sequences, run.num_micro_batches)[0]
    runner = GridRunner(
        next(iter(run.trainers.values())).target, num_sequences=part.stop - part.start, num_positions=20
    )
    train(run, runner, dataset, until_step=until_step, progress=lambda line: None)


def fresh_run(**options: Any) -> TrainingRun:
    return TrainingRun({recipe.name: tiny.trainer(recipe) for recipe in recipes()}, **options)


def losses(run: TrainingRun) -> Tensor:
    return torch.tensor([[row["loss"] for row in rows] for rows in run.logs.values()])


def follow(folder: Path, micro_batches: int) -> None:
    """What each of two processes does: all steps; five, a checkpoint, and the rest from it."""
    loop.LOG_EVERY_STEPS = 1
    with launched_ranks(CPU) as (ranks, _):
        first = fresh_run(num_micro_batches=micro_batches, ranks=ranks)
        run_steps(first, NUM_STEPS)
        torch.save(
            ({name: each.model.state_dict() for name, each in first.trainers.items()}, losses(first)),
            folder / f"{ranks.rank}.pt",
        )
        half = fresh_run(num_micro_batches=micro_batches, ranks=ranks)
        run_steps(half, 5)
        if ranks.is_first:
            write_checkpoint(folder / "run.pt", half, text={})
        ranks.any(False, CPU)  # the file is there for all
        last = fresh_run(num_micro_batches=micro_batches, ranks=ranks)
        resume(folder / "run.pt", last, text={})
        run_steps(last, NUM_STEPS)
        torch.save(losses(last), folder / f"resumed{ranks.rank}.pt")


@pytest.fixture(autouse=True)
def every_step_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 1)


@pytest.fixture(scope="module")
def one_process() -> TrainingRun:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "LOG_EVERY_STEPS", 1)
        run = fresh_run()
        run_steps(run, NUM_STEPS)
        return run


def test_micro_batches_change_only_the_order_of_sums(one_process: TrainingRun) -> None:
    """T-073 a: the logged loss is not multiplied by their number either."""
    cut = fresh_run(num_micro_batches=4)
    run_steps(cut, NUM_STEPS)
    torch.testing.assert_close(losses(cut), losses(one_process), atol=2e-5, rtol=2e-4)
    slots = [[row["acceptance_by_slot"] for row in run.logs["tiny"]] for run in (cut, one_process)]
    assert slots[0][0] == pytest.approx(slots[1][0], rel=1e-4)


class ThreadRanks(Ranks):
    """Ranks that are threads of this process: what is exchanged is the same, and no process has to start."""

    barrier = threading.Barrier(2)
    given: ClassVar[dict[int, list[Tensor]]] = {}

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        self.given[self.rank] = [each.detach().clone() for each in tensors]
        self.barrier.wait(timeout=20)
        for each, one, two in zip(tensors, self.given[0], self.given[1], strict=True):
            each.detach().copy_(one + two)
        self.barrier.wait(timeout=20)


def test_two_ranks_take_the_steps_of_one(one_process: TrainingRun) -> None:
    """T-070: also where a rank's share of a step has no answer to learn from."""
    dataset = BlockDataset(texts(), num_held_out=2, seed=1)
    drawn = [dataset.text(step, num_sequences=4) for step in range(NUM_STEPS)]
    answered = torch.stack([(text.first_label < 99).view(2, 2).sum(dim=1) for text in drawn])
    assert (answered.min(dim=1).values == 0).any()
    runs = [fresh_run(ranks=ThreadRanks(rank, 2)) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run_steps, run, NUM_STEPS) for run in runs]:
            future.result(timeout=60)
    torch.testing.assert_close(losses(runs[0]), losses(one_process), atol=2e-5, rtol=2e-4)
    assert torch.equal(losses(runs[0]), losses(runs[1]))
    for name, trainer in runs[0].trainers.items():
        theirs = runs[1].trainers[name].model.state_dict()
        assert all(torch.equal(values, theirs[key]) for key, values in trainer.model.state_dict().items())


@pytest.mark.slow
def test_two_processes_are_one_and_go_on_from_a_checkpoint(one_process: TrainingRun, tmp_path: Path) -> None:
    """T-070, T-071: equal losses and weights of both, whatever share of the text has an answer; bit-equal resuming."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    code = f"from tests.training.test_parallel import follow, Path; follow(Path({str(tmp_path)!r}), 2)"
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in (0, 1)
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    (state, found_losses), (other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    torch.testing.assert_close(found_losses, losses(one_process), atol=2e-5, rtol=2e-4)
    for name, tensors in state.items():
        assert all(torch.equal(values, other[name][key]) for key, values in tensors.items())
    assert torch.equal(torch.load(tmp_path / "resumed0.pt"), found_losses)


def test_shares_are_equal_and_cover_every_sequence() -> None:
    shares = [Ranks(rank, 2).shares(12, 3) for rank in (0, 1)]
    assert [(part.start, part.stop) for each in shares for part in each] == [(2 * i, 2 * i + 2) for i in range(6)]
    with pytest.raises(ConfigError, match="batch_sequences=10 cannot be cut into 2 processes of 2 micro-batches"):
        Ranks(0, 2).shares(10, 2)
    with pytest.raises(ConfigError, match="of 0 micro-batches"):
        Ranks().shares(4, 0)


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but RANK is not set\. Start .* with torchrun"):
        launched_ranks(CPU).__enter__()


def test_alone_there_is_nothing_to_exchange() -> None:
    with launched_ranks(CPU) as (ranks, device):
        values = torch.ones(2)
        ranks.add_up([values])
        assert ranks.is_first
        assert ranks.any(True, device)
        assert not ranks.any(False, device)
        assert values.tolist() == [1.0, 1.0]
