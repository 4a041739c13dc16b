"""Name plans as their tool writes them: what it writes reads back, from transformers' classes and from real headers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from outrider.weights.name_plan import read_name_plan
from tests.plans import plan_path
from tests.training import tiny
from tools import name_plans
from tools.name_plans import SHAPES, Tensors, compress, meta_tensors, unused_keys_values


def test_names_are_written_together_and_read_back() -> None:
    headers = read_name_plan(plan_path("Gemma-4-26B-A4B-NVFP4")).headers
    tensors: Tensors = {name: (header.dtype, header.shape) for name, header in headers.items()}
    written = compress(tensors)
    assert len(written) < 100 < len(tensors)
    assert written["model.language_model.layers.{0-29}.experts.{0-127}.up_proj.weight"] == ["U8", [704, 1408]]
    kinds: Tensors = {f"l.{i}.w": ("BF16", (1 + (i in (2, 5)),)) for i in range(7)}
    assert compress(kinds) == {"l.{0-1,3-4,6}.w": ["BF16", [1]], "l.{2,5}.w": ["BF16", [2]]}
    uneven: Tensors = {f"l.{i}.e.{j}.w": ("BF16", (1,)) for i, j in ((0, 0), (0, 1), (1, 0))}
    assert compress(uneven) == {"l.0.e.{0-1}.w": ["BF16", [1]], "l.1.e.0.w": ["BF16", [1]]}


def test_a_shipped_plan_is_what_transformers_makes_of_its_config() -> None:
    """E2B, which has every tower, per-layer embeddings and layers that read another's keys and values."""
    _, config = SHAPES["E2B"]
    made = meta_tensors(config) | unused_keys_values(config)
    headers = read_name_plan(plan_path("gemma-4-E2B-it")).headers
    assert made == {name: (header.dtype, header.shape) for name, header in headers.items()}


def test_a_plan_from_the_headers_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_plans, "FOLDER", tmp_path / "plans")
    source = tiny.write_target(tmp_path / "tiny")
    name_plans.write_from(source, "tiny")
    plan = read_name_plan(tmp_path / "plans" / "tiny")
    assert (plan.evidence, plan.checkpoint) == ("read", "tiny")
    assert plan.headers["model.norm.weight"].shape == (tiny.HIDDEN,)
    assert len(plan.headers) == 2 + 13 * tiny.NUM_LAYERS
    assert json.loads((tmp_path / "plans" / "tiny" / "config.json").read_text()) == tiny.CONFIG


def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, num_parameters: int) -> str:
    """A plan in a folder of its own that claims another published total."""
    name = "gemma-4-12B-it"
    shutil.copytree(plan_path(name), tmp_path / name)
    path = tmp_path / name / "tensors.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, "num_parameters": num_parameters}))
    monkeypatch.setattr(name_plans, "FOLDER", tmp_path)
    return name


def test_an_upgraded_plan_keeps_what_was_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_target(tmp_path / "tiny")
    monkeypatch.setattr(name_plans, "FOLDER", tmp_path)
    name_plans.write_from(source, "tiny-plan")
    headers = read_name_plan(tmp_path / "tiny-plan").headers
    name = copied(tmp_path, monkeypatch, num_parameters=sum(math.prod(each.shape) for each in headers.values()))
    before = read_name_plan(tmp_path / name)
    name_plans.write_from(source, name)
    after = read_name_plan(tmp_path / name)
    assert (after.checkpoint, after.num_parameters) == (before.checkpoint, before.num_parameters)
    assert (before.evidence, after.evidence) == ("derived", "read")


def test_another_checkpoint_replaces_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = copied(tmp_path, monkeypatch, num_parameters=11_959_730_224)
    before = (tmp_path / name / "tensors.json").read_bytes()
    with pytest.raises(SystemExit, match=r"was published with 11959730224: it is another checkpoint"):
        name_plans.write_from(tiny.write_target(tmp_path / "tiny"), name)
    assert (tmp_path / name / "tensors.json").read_bytes() == before
