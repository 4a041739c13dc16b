"""Directories of safetensors files: one file, shards, and int8 groups."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import LocateError, UnsupportedModelError, WeightsError
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight, quantize_int8
from outrider.weights.safetensors_dir import INDEX_NAME, load_safetensors_dir
from outrider.weights.safetensors_file import SafetensorsFile

INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}


def with_weights(**changes: Any) -> dict[str, Any]:
    group = INT8["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


FOUR_BITS, ASYMMETRIC = with_weights(num_bits=4), with_weights(symmetric=False)


def write(
    path: Path, tensors: dict[str, torch.Tensor], *, quantization: dict[str, Any] | None = None, name: str = "model"
) -> Path:
    path.mkdir(exist_ok=True)
    config = {"hidden_size": 64} if quantization is None else {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / f"{name}.safetensors")
    return path


def read_all(path: Path) -> dict[str, PackedWeight]:
    return dict(load_safetensors_dir(path)[1])


def write_shards(path: Path, *, weight_map: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, path / "s1.safetensors")
    save_file({"b": torch.full((3,), 2.0)}, path / "s2.safetensors")
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.fixture
def int8_tensors() -> dict[str, torch.Tensor]:
    weight = quantize_int8("w", torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), group_size=32)
    return {"x.weight": weight.values, "x.weight_scale": weight.scales.to(torch.float16), "n.weight": torch.ones(4)}


def test_plain_tensors(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(3, 4).to(torch.bfloat16), "d2t": torch.arange(5)}
    config, weights = load_safetensors_dir(write(tmp_path / "m", tensors, name="any_name"))
    assert config == {"hidden_size": 64}
    for name, tensor in tensors.items():
        weight = weights[name]
        assert isinstance(weight, DenseWeight)
        assert (weight.name, weight.values.dtype) == (name, tensor.dtype)
        assert torch.equal(weight.values, tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int8_groups(tmp_path: Path, int8_tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    int8_tensors["x.weight_scale"] = int8_tensors["x.weight_scale"].to(dtype)
    _, weights = load_safetensors_dir(write(tmp_path / "m", int8_tensors, quantization=INT8))
    assert weights.keys() == {"x.weight", "n.weight"}
    weight = weights["x.weight"]
    assert isinstance(weight, BlockInt8Weight)
    assert (weight.group_size, weight.offsets, weight.scales.dtype) == (32, None, torch.float32)
    scales = int8_tensors["x.weight_scale"].float().repeat_interleave(32, dim=1)
    assert torch.equal(weight.dequantize(torch.float32), int8_tensors["x.weight"].float() * scales)


def test_int8_without_a_declaration(tmp_path: Path, int8_tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(
        WeightsError, match=r"tensor x\.weight is int8, but config\.json declares no quantization_config"
    ):
        load_safetensors_dir(write(tmp_path / "m", int8_tensors))


def test_int8_without_scales(tmp_path: Path, int8_tensors: dict[str, torch.Tensor]) -> None:
    del int8_tensors["x.weight_scale"]
    with pytest.raises(WeightsError, match=r"x\.weight_scale is missing"):
        load_safetensors_dir(write(tmp_path / "m", int8_tensors, quantization=INT8))


def test_int8_with_scales_of_another_shape(tmp_path: Path, int8_tensors: dict[str, torch.Tensor]) -> None:
    int8_tensors["x.weight_scale"] = torch.ones(8, 1)
    with pytest.raises(WeightsError, match=r"weight_scale has shape \(8, 1\).*needs \(8, 2\)"):
        load_safetensors_dir(write(tmp_path / "m", int8_tensors, quantization=INT8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -0.5])
def test_int8_with_a_scale_that_is_no_scale(tmp_path: Path, int8_tensors: dict[str, torch.Tensor], bad: float) -> None:
    int8_tensors["x.weight_scale"][3, 1] = bad
    with pytest.raises(
        WeightsError, match=r"x\.weight_scale has scales that are not finite and above zero: 1 .* at \[7\]"
    ):
        read_all(write(tmp_path / "m", int8_tensors, quantization=INT8))


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "gptq"},
        {"format": "float-quantized"},
        {"config_groups": {}},
        {"config_groups": {"g": {}}},
        FOUR_BITS,
        ASYMMETRIC,
        with_weights(group_size="x"),
        with_weights(group_size=-32),
        with_weights(group_size=32.5),
        with_weights(group_size=True),
    ],
)
def test_other_quantisations_are_named(
    tmp_path: Path, int8_tensors: dict[str, torch.Tensor], change: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json declares the quantisation .*Supported:"):
        load_safetensors_dir(write(tmp_path / "m", int8_tensors, quantization={**INT8, **change}))


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        (0, "quantization_config is 0"),
        ("x", "quantization_config is 'x'"),
        ([], r"quantization_config is \[\]"),
        ({**INT8, "config_groups": None}, "config_groups is None"),
        ({**INT8, "config_groups": 1}, "config_groups is 1"),
        ({**INT8, "config_groups": []}, r"config_groups is \[\]"),
        ({**INT8, "config_groups": {"g": None}}, "group in config_groups is None"),
        ({**INT8, "config_groups": {"g": 1}}, "group in config_groups is 1"),
        ({**INT8, "config_groups": {"g": {"weights": None}}}, "weights of config_groups is None"),
    ],
)
def test_quantisation_that_is_no_object_is_named(
    tmp_path: Path, int8_tensors: dict[str, torch.Tensor], quantization: Any, field: str
) -> None:
    with pytest.raises(WeightsError, match=rf"config\.json: .*{field}; expected an object"):
        load_safetensors_dir(write(tmp_path / "m", int8_tensors, quantization=quantization))


@pytest.mark.parametrize("shape", [(), (64,), (2, 4, 64)])
def test_int8_that_is_no_matrix(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {"x.weight": torch.ones(shape, dtype=torch.int8), "x.weight_scale": torch.ones(8, 2)}
    with pytest.raises(WeightsError, match=r"tensor x\.weight is int8 of shape .*expected a matrix"):
        load_safetensors_dir(write(tmp_path / "m", tensors, quantization=INT8))


def test_int8_with_scales_of_another_kind(tmp_path: Path, int8_tensors: dict[str, torch.Tensor]) -> None:
    int8_tensors["x.weight_scale"] = int8_tensors["x.weight_scale"].to(torch.int8)
    with pytest.raises(
        WeightsError, match=r"tensor x\.weight_scale has dtype I8; int-quantized weights need F32 or F16 or BF16"
    ):
        load_safetensors_dir(write(tmp_path / "m", int8_tensors, quantization=INT8))


def test_a_norm_weight_that_is_not_finite(tmp_path: Path, int8_tensors: dict[str, torch.Tensor]) -> None:
    int8_tensors["n.weight"][2] = float("nan")
    with pytest.raises(WeightsError, match=r"model\.safetensors: tensor n\.weight has values that are not finite"):
        read_all(write(tmp_path / "m", int8_tensors, quantization=INT8))


def test_shards(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "m", weight_map={"a": "s1.safetensors", "b": "s2.safetensors"})
    _, weights = load_safetensors_dir(path)
    assert {name: weight.shape for name, weight in weights.items()} == {"a": (2,), "b": (3,)}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "s1.safetensors", "b": "s3.safetensors"}, r"names s3\.safetensors, which .* lacks"),
        (
            {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"},
            r"tensor c: .*s2\.safetensors lacks it",
        ),
        ({"b": "s2.safetensors", "a": "s2.safetensors"}, r"tensor a: .*s2\.safetensors lacks it"),
        ({}, "has no weight_map"),
        ({"a": 1}, f"{INDEX_NAME} has tensor a in 1; expected the name of a file"),
        ({"a": ["x"]}, r"has tensor a in \['x'\]; expected"),
        ({"a": None}, "has tensor a in None; expected"),
        ({"a": ""}, "has tensor a in ''; expected"),
        ({"a": "../m/s1.safetensors"}, r"has tensor a in '\.\./m/s1\.safetensors'; expected"),
    ],
)
def test_index_that_does_not_match(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        load_safetensors_dir(write_shards(tmp_path / "m", weight_map=weight_map))


def test_shard_with_a_tensor_that_its_index_lacks(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "m", weight_map={"a": "s1.safetensors", "b": "s2.safetensors"})
    save_file({"a": torch.ones(2), "extra": torch.ones(1)}, path / "s1.safetensors")
    with pytest.raises(WeightsError, match=r"tensor extra: .*s1\.safetensors has it, but its index does not list it"):
        load_safetensors_dir(path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "m", weight_map={"a": "s1.safetensors", "b": "s2.safetensors"})
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, path / "s2.safetensors")
    with pytest.raises(WeightsError, match=r"s2\.safetensors repeats tensor a, which .*s1\.safetensors has"):
        load_safetensors_dir(path)


def test_an_index_that_lists_a_tensor_twice(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "m", weight_map={"a": "s1.safetensors", "b": "s2.safetensors"})
    text = '{"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors", "a": "s2.safetensors"}}'
    (path / INDEX_NAME).write_text(text)
    with pytest.raises(WeightsError, match=rf"{INDEX_NAME} has a twice"):
        load_safetensors_dir(path)


def test_tensors_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = SafetensorsFile.tensor
    monkeypatch.setattr(SafetensorsFile, "tensor", lambda file, name: (read.append(name), real(file, name))[1])
    path = write_shards(tmp_path / "m", weight_map={"a": "s1.safetensors", "b": "s2.safetensors"})
    _, weights = load_safetensors_dir(path)
    assert (list(weights), len(weights), "a" in weights, "c" in weights) == (["a", "b"], 2, True, False)
    assert read == []
    assert weights["b"].dequantize(torch.float32).tolist() == [2.0, 2.0, 2.0]
    assert read == ["b"]
    with pytest.raises(KeyError):
        weights["c"]


def test_a_weight_that_nobody_holds_is_not_kept(tmp_path: Path, int8_tensors: dict[str, torch.Tensor]) -> None:
    _, weights = load_safetensors_dir(write(tmp_path / "m", int8_tensors, quantization=INT8))
    values = weights["n.weight"].dequantize(torch.float32)
    gone = weakref.ref(values)
    del values
    assert gone() is None


def test_the_parts_of_a_weight_may_lie_in_different_shards(
    tmp_path: Path, int8_tensors: dict[str, torch.Tensor]
) -> None:
    path = write(tmp_path / "m", {"x.weight": int8_tensors["x.weight"]}, quantization=INT8, name="s1")
    write(path, {"x.weight_scale": int8_tensors["x.weight_scale"]}, quantization=INT8, name="s2")
    weight_map = {"x.weight": "s1.safetensors", "x.weight_scale": "s2.safetensors"}
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    scales = int8_tensors["x.weight_scale"].float().repeat_interleave(32, dim=1)
    expected = int8_tensors["x.weight"].float() * scales
    assert torch.equal(read_all(path)["x.weight"].dequantize(torch.float32), expected)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"a": torch.ones(1)})
    write(path, {"b": torch.ones(1)}, name="other")
    with pytest.raises(WeightsError, match=r"has 2 \*\.safetensors files and no model\.safetensors\.index\.json"):
        load_safetensors_dir(path)


def test_config_missing_or_broken(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"a": torch.ones(1)})
    (path / "config.json").write_text("{cut")
    with pytest.raises(WeightsError, match=r"config\.json is not JSON"):
        load_safetensors_dir(path)
    (path / "config.json").write_text("[" * 100_000)
    with pytest.raises(WeightsError, match=r"config\.json is not JSON"):
        load_safetensors_dir(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"config\.json is not a JSON object"):
        load_safetensors_dir(path)
    (path / "config.json").unlink()
    with pytest.raises(LocateError, match=r"config\.json does not exist"):
        load_safetensors_dir(path)


def test_a_file_where_a_directory_is_due(tmp_path: Path) -> None:
    file = tmp_path / "drafter.gguf"
    file.write_bytes(b"x")
    with pytest.raises(LocateError, match=r"drafter\.gguf is not a directory\. Give a directory with config\.json"):
        load_safetensors_dir(file)
