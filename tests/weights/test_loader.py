"""Checkpoints from both formats, and claims on their tensors."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import LocateError, UnsupportedModelError, WeightsError
from outrider.weights import loader
from outrider.weights.loader import Checkpoint, TensorClaims, load_checkpoint
from outrider.weights.locate import locate_target
from outrider.weights.packed import DenseWeight, PackedWeight
from tests.plans import plan_path

SECOND_LOAD_LIMIT_S = 5.0


def write_directory(path: Path, *, model_type: Any = "gemma3_text") -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"model.norm.weight": torch.ones(4)}, path / "model.safetensors")
    return path


def test_second_load_of_the_embedded_default_is_quick(embedded_checkpoint: Checkpoint) -> None:
    messages: list[str] = []
    start = time.perf_counter()
    again = load_checkpoint(locate_target(None), progress=messages.append)
    total = sum(int(weight.shape[0]) for weight in again.tensors.values())
    seconds = time.perf_counter() - start
    assert messages == []
    assert total > 262_144
    assert seconds < SECOND_LOAD_LIMIT_S


def test_embedded_default_declares_its_facts(embedded_checkpoint: Checkpoint) -> None:
    assert embedded_checkpoint.norm_offset == 0.0
    assert embedded_checkpoint.sha256() == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert embedded_checkpoint.source == locate_target(None)
    assert embedded_checkpoint.tokenizer_path.is_file()


def test_gguf_file(cache: Path, tiny_gguf: Path) -> None:
    messages: list[str] = []
    checkpoint = load_checkpoint(tiny_gguf, progress=messages.append)
    assert messages == ["Preparing tiny.gguf (once)"]
    assert checkpoint.norm_offset == 0.0
    assert checkpoint.sha256() == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    assert checkpoint.tensors["model.norm.weight"].shape == (256,)


def test_changed_gguf_file_is_prepared_anew(cache: Path, tiny_gguf: Path) -> None:
    before = load_checkpoint(tiny_gguf).tensors["model.norm.weight"].dequantize(torch.float32).clone()
    data = bytearray(tiny_gguf.read_bytes())
    place = data.index(before.numpy().tobytes())
    data[place : place + 4] = torch.tensor([7.5]).numpy().tobytes()
    tiny_gguf.write_bytes(bytes(data))
    after = load_checkpoint(tiny_gguf).tensors["model.norm.weight"].dequantize(torch.float32)
    assert float(after[0]) == 7.5
    assert torch.equal(after[1:], before[1:])


def test_directory(cache: Path, tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m")
    checkpoint = load_checkpoint(path)
    assert checkpoint.norm_offset == 1.0
    assert checkpoint.config == {"model_type": "gemma3_text"}
    assert (checkpoint.source, checkpoint.tokenizer_path) == (path, path / "tokenizer.json")
    first = checkpoint.sha256()
    save_file({"model.norm.weight": torch.zeros(4, 4)}, path / "model.safetensors")
    assert load_checkpoint(path).sha256() != first


def test_a_directory_is_hashed_only_when_somebody_asks(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hashed = write_directory(tmp_path / "m"), []
    monkeypatch.setattr(loader, "file_sha256", lambda file: hashed.append(file.name) or "0")
    checkpoint = load_checkpoint(path)
    assert (checkpoint.source_sha256, hashed) == (None, [])
    assert len(checkpoint.sha256()) == 64
    assert hashed == ["config.json", "model.safetensors"]


def test_a_name_plan_is_a_checkpoint_without_numbers(cache: Path) -> None:
    path = plan_path("gemma-4-12B-it")
    with pytest.raises(LocateError, match=r"gemma-4-12B-it is a name plan: it has no numbers, and only `outrider"):
        load_checkpoint(path)
    checkpoint = load_checkpoint(path, without_numbers=True)
    norm = checkpoint.tensors["model.language_model.norm.weight"].dequantize(torch.bfloat16, "meta")
    assert (norm.is_meta, tuple(norm.shape)) == (True, (3840,))
    assert checkpoint.config["eos_token_id"] == [1, 106]


def test_unknown_model_type_is_named(cache: Path, tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", model_type="llama")
    with pytest.raises(UnsupportedModelError, match=r"config\.json has model_type 'llama'; targets have gemma3_text"):
        load_checkpoint(path)


@pytest.mark.parametrize("model_type", [[], {}, 1])
def test_model_type_of_the_wrong_kind_is_named(cache: Path, tmp_path: Path, model_type: Any) -> None:
    """Seen red: looking it up as it stands, which a list or a table cannot be."""
    path = write_directory(tmp_path / "m", model_type=model_type)
    with pytest.raises(WeightsError, match=r"config\.json has model_type=.*; expected a string"):
        load_checkpoint(path)


def test_missing_path(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(LocateError, match=r"absent\.gguf does not exist"):
        load_checkpoint(tmp_path / "absent.gguf")


@pytest.fixture
def claims() -> TensorClaims:
    shapes: dict[str, tuple[int, ...]] = {
        "norm.weight": (4,),
        "layers.0.q.weight": (2, 4),
        "vision.a": (1,),
        "vision.b": (1,),
    }
    tensors: dict[str, PackedWeight] = {name: DenseWeight(name, torch.ones(shape)) for name, shape in shapes.items()}
    return TensorClaims(tensors, source=Path("model.gguf"))


def test_claims_hand_out_each_tensor(claims: TensorClaims) -> None:
    assert "norm.weight" in claims
    assert "head.weight" not in claims
    assert claims.take("norm.weight", (4,)).name == "norm.weight"
    assert claims.take("layers.0.q.weight", (2, 4)).shape == (2, 4)
    assert claims.finish(skip=("vision.*",)) == ["vision.a", "vision.b"]


def test_missing_tensor(claims: TensorClaims) -> None:
    with pytest.raises(WeightsError, match=r"^tensor layers\.9\.k is missing from model\.gguf\.$"):
        claims.take("layers.9.k", (4,))


def test_missing_tensor_that_is_there_under_a_prefix(claims: TensorClaims) -> None:
    with pytest.raises(WeightsError, match=r"missing from model\.gguf\. It has norm\.weight: rename"):
        claims.take("model.norm.weight", (4,))


def test_tensor_of_another_shape(claims: TensorClaims) -> None:
    with pytest.raises(
        WeightsError, match=r"layers\.0\.q\.weight of model\.gguf has shape \(2, 4\), .* needs \(4, 2\)"
    ):
        claims.take("layers.0.q.weight", (4, 2))


def test_tensor_claimed_twice(claims: TensorClaims) -> None:
    claims.take("norm.weight", (4,))
    with pytest.raises(WeightsError, match=r"norm\.weight of model\.gguf is claimed twice"):
        claims.take("norm.weight", (4,))


def test_unclaimed_tensors_are_named(claims: TensorClaims) -> None:
    claims.take("norm.weight", (4,))
    with pytest.raises(WeightsError, match=r"does not use: layers\.0\.q\.weight, vision\.b\."):
        claims.finish(skip=("vision.a",))


def test_many_unclaimed_tensors_are_counted() -> None:
    tensors: dict[str, PackedWeight] = {f"t{i}": DenseWeight(f"t{i}", torch.ones(1)) for i in range(8)}
    with pytest.raises(WeightsError, match=r"t0, t1, t2, t3, t4 and 3 more\."):
        TensorClaims(tensors, source=Path("x")).finish()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integers_are_no_weights(dtype: torch.dtype) -> None:
    claims = TensorClaims({"fc.weight": DenseWeight("fc.weight", torch.ones(2, 2, dtype=dtype))}, source=Path("d"))
    with pytest.raises(WeightsError, match=r"fc\.weight of d is torch\.\w+; expected floating-point numbers"):
        claims.take("fc.weight", (2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_a_table_has_its_dtype(dtype: torch.dtype) -> None:
    claims = TensorClaims({"d2t": DenseWeight("d2t", torch.ones(3, dtype=dtype))}, source=Path("d"))
    with pytest.raises(WeightsError, match=r"d2t of d is torch\.\w+; expected torch\.int64 or torch\.int32"):
        claims.take_table("d2t", (3,), torch.int64, torch.int32)
