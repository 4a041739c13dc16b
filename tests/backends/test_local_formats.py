"""A target stored in few bits writes what its dequantised dense copy writes.

Seen red: the nibbles of an int4 word read in the opposite order.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.backends.local import load
from outrider.core import SamplingParams
from outrider.engine.engine import EngineConfig
from outrider.errors import WeightsError
from outrider.weights.low_bit import LowBitWeight
from outrider.weights.safetensors_dir import load_safetensors_dir
from tests.training import tiny
from tests.weights.low_bit_writer import CONFIGS, write_low_bit_target

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = [[2, 40, 41, 42], [2, 77, 12, 60, 9]]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny target in plain numbers."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = tiny.write_target(tmp_path / "plain")
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][1::2] -= 2.0  # factors of both signs, or a tied head repeats its input for ever
    save_file(tensors, path / "model.safetensors")
    return path


def written(path: Path) -> list[tuple[int, ...]]:
    llm = load(str(path), kernels="torch", device="cpu", config=EngineConfig(max_seats=2, context_length=64))
    return [generation.token_ids for generation in llm.generate(PROMPTS, PARAMS)]


def dense_copy(path: Path, directory: Path) -> Path:
    """The same target, its numbers written out in float32."""
    _, weights = load_safetensors_dir(path)
    assert any(isinstance(weight, LowBitWeight) for weight in weights.values())
    directory.mkdir()
    save_file({name: each.dequantize(torch.float32) for name, each in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(tiny.CONFIG))
    (directory / "tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes())
    return directory


@pytest.mark.parametrize("layout", CONFIGS)
def test_writes_what_its_dense_copy_writes(layout: str, source: Path, tmp_path: Path) -> None:
    packed = write_low_bit_target(layout, source, tmp_path / "packed")
    dense = dense_copy(packed, tmp_path / "dense")
    tokens = written(packed)
    assert tokens == written(dense)
    assert len({token_id for answer in tokens for token_id in answer}) > 4


def test_numbers_stay_near_the_original(source: Path, tmp_path: Path) -> None:
    plain = load_safetensors_dir(source)[1]
    for layout in CONFIGS:
        packed = load_safetensors_dir(write_low_bit_target(layout, source, tmp_path / layout))[1]
        for name in plain:
            near, exact = packed[name].dequantize(torch.float32), plain[name].dequantize(torch.float32)
            assert (near - exact).norm() < 0.25 * exact.norm(), (layout, name)


def test_a_shape_that_the_config_does_not_need_is_named(source: Path, tmp_path: Path) -> None:
    packed = write_low_bit_target("int4", source, tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(WeightsError, match=r"mlp\.gate_proj\.weight of .* has shape \(64, 32\)"):
        written(packed)
