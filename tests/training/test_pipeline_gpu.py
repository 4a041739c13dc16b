"""Training on a GPU: every shape fits the embedded default, memory is what preflight says, two GPUs are one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.training import loop
from outrider.training.config import Recipe, load_recipe
from outrider.training.pipeline import RunOptions, make_text, prepare, train_drafters
from outrider.training.preflight import rehearse
from outrider.weights.locate import locate_target

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 30


def small(name: str, **optimize: Any) -> Recipe:
    """A shipped recipe with little text and few steps, all of them logged."""
    recipe = load_recipe(ROOT / "recipes" / f"{name}.toml")
    sizes = {"batch_sequences": 32, "num_greedy_batches": 2, "num_sampled_batches": 1, "num_filtered_batches": 1}
    fitted = {"num_steps": NUM_STEPS, "batch_sequences": 16, "num_held_out_sequences": 8, "full_block_every_steps": 1}
    return replace(
        recipe,
        generate=replace(recipe.generate, **sizes),
        optimize=replace(recipe.optimize, **{**fitted, "seed": 1, **optimize}),
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.pt"
    target, device = locate_target(None), torch.device("cuda")
    make_text(target, small("gemma3-270m-dflash"), path, device=device, progress=lambda line: None)
    return path


def trained(recipes: list[Recipe], text: Path, out: Path, options: RunOptions | None = None) -> dict[str, Any]:
    return train_drafters(
        locate_target(None),
        recipes,
        text,
        out,
        device=torch.device("cuda"),
        progress=lambda line: None,
        options=options,
    )


@pytest.fixture(autouse=True)
def every_step_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 1)


@pytest.mark.parametrize("name", ["gemma3-270m-dflash", "gemma3-270m-dspark", "gemma3-270m-deepspec"])
def test_losses_fall_and_memory_is_what_was_counted(name: str, text: Path, tmp_path: Path) -> None:
    recipe, device = small(name), torch.device("cuda")
    ready = prepare(locate_target(None), [recipe], text, device=device, options=RunOptions())
    counted = ready.preflight()
    found = rehearse(ready.run, ready.runner, ready.dataset, counted)
    assert found.measured_peak_bytes is not None
    assert counted.peak_bytes == pytest.approx(found.measured_peak_bytes, rel=0.1), counted.memory_bytes
    del ready
    torch.cuda.empty_cache()
    record = trained([recipe], text, tmp_path)[recipe.name]
    losses = [row["loss"] for row in record["log"]]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert (tmp_path / recipe.name / "model.safetensors").is_file()


def test_micro_batches_change_little_but_the_memory(text: Path, tmp_path: Path) -> None:
    """bfloat16 sums in another order: the first losses agree to a percent."""
    recipe = small("gemma3-270m-dspark")
    losses = [
        [row["loss"] for row in trained([recipe], text, tmp_path / str(cut), options)[recipe.name]["log"]][:5]
        for cut, options in ((1, RunOptions()), (4, RunOptions(num_micro_batches=4)))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_are_one(text: Path, tmp_path: Path) -> None:
    """Under torchrun, by the same command line."""
    path = tmp_path / "recipe.toml"
    source = (ROOT / "recipes" / "gemma3-270m-dspark.toml").read_text()
    for old, new in (("num_steps = 10000", f"num_steps = {NUM_STEPS}"), ("sequences = 64", "sequences = 16")):
        source = source.replace(old, new)
    path.write_text(source.replace("held_out_sequences = 256", "held_out_sequences = 8"))
    command = [str(path), "--data", str(text), "--device", "cuda", "--json"]
    one = [sys.executable, "-m", "outrider", "train", "run", *command, "--out", str(tmp_path / "one")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two = [*launch, "-m", "outrider", "train", "run", *command, "--out", str(tmp_path / "two")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NCCL_NVLS_ENABLE": "0"}
    for each in (one, two):
        subprocess.run(each, env=env, check=True, timeout=240)
    logs = [
        json.loads((tmp_path / which / "gemma3-270m-dspark" / "training_record.json").read_text())
        for which in ("one", "two")
    ]
    assert logs[1]["num_processes"] == 2
    first, second = ([row["loss"] for row in log["log"]] for log in logs)
    assert second[0] == pytest.approx(first[0], rel=0.01)
    assert second[-1] == pytest.approx(first[-1], rel=0.05)  # thirty bfloat16 steps on
