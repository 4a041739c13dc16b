"""Declarations of quantised weights: what is read, what is refused and how it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.quantization import MODELOPT_NAME, Layout, Scheme, read_scheme
from tests.weights.low_bit_writer import NVFP4_ARGS, compressed_tensors, float8_config, int4_config

INT4_ARGS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def read(declared: Any, path: Path) -> Scheme | None:
    return read_scheme({"quantization_config": declared}, path=path)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (int4_config(128), Scheme(Layout.INT4, 128, ignored=("lm_head",))),
        (int4_config(32, symmetric=False), Scheme(Layout.INT4, 32, is_symmetric=False, ignored=("lm_head",))),
        (float8_config("tensor"), Scheme(Layout.FLOAT8, 0, block=(0, 0), ignored=("lm_head",))),
        (float8_config("channel"), Scheme(Layout.FLOAT8, 0, block=(1, 0), ignored=("lm_head",))),
        (
            float8_config("block", block_structure=[128, 64]),
            Scheme(Layout.FLOAT8, 0, block=(128, 64), ignored=("lm_head",)),
        ),
        (compressed_tensors("nvfp4-pack-quantized", **NVFP4_ARGS), Scheme(Layout.NVFP4, 16, ignored=("lm_head",))),
        (MODELOPT, Scheme(Layout.MODELOPT_NVFP4, 16)),
        ({**MODELOPT, "config_groups": {"g": {"weights": NVFP4_ARGS}}}, Scheme(Layout.MODELOPT_NVFP4, 16)),
        ({**MODELOPT, "quant_algo": "FP8"}, Scheme(Layout.MODELOPT_FLOAT8, 0, block=(0, 0))),
        (
            {**MODELOPT, "quant_algo": "FP8", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
            Scheme(Layout.MODELOPT_FLOAT8, 0, block=(0, 0)),
        ),
    ],
)
def test_schemes(declared: dict[str, Any], expected: Scheme, tmp_path: Path) -> None:
    assert read(declared, tmp_path) == expected


def test_no_declaration(tmp_path: Path) -> None:
    assert read_scheme({}, path=tmp_path) is None
    assert read(None, tmp_path) is None


@pytest.mark.parametrize(
    "declared",
    [
        compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=True),
        compressed_tensors("pack-quantized", num_bits=8, type="int", strategy="group", group_size=32),
        compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=0),
        compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric="yes"),
        compressed_tensors("pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        float8_config("group", group_size=128),
        float8_config("block"),
        float8_config("block", block_structure=[128, 0]),
        float8_config("block", block_structure=[128]),
        float8_config(["tensor"]),  # type: ignore[arg-type]
        compressed_tensors("nvfp4-pack-quantized", **{**NVFP4_ARGS, "group_size": 32}),
        compressed_tensors("marlin-24", num_bits=4, type="int", strategy="group", group_size=32),
        {**int4_config(), "config_groups": {**int4_config()["config_groups"], "group_1": {}}},
        {**int4_config(), "quant_method": "gptq"},
        {**MODELOPT, "quant_algo": "W4A8_AWQ"},
        {**MODELOPT, "config_groups": {"g": {"weights": {**NVFP4_ARGS, "group_size": 32}}}},
        {**MODELOPT, "quant_algo": "FP8", "group_size": 128},
        {**MODELOPT, "quant_algo": "FP8_PB_WO"},
    ],
)
def test_what_cannot_be_read_is_named(declared: dict[str, Any], tmp_path: Path) -> None:
    method = declared["quant_method"]
    with pytest.raises(UnsupportedModelError, match=rf"config\.json declares the quantisation {method} / .*Supported:"):
        read(declared, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ignore": "lm_head"}, "ignore is 'lm_head'; expected a list of module names"),
        ({"ignore": [1]}, r"ignore is \[1\]; expected a list"),
        ({"ignore": ["re:("]}, r"ignore has 're:\(', which is no regular expression"),
    ],
)
def test_ignore_lists_that_are_none(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=message):
        read({**int4_config(), **change}, tmp_path)


def test_ignored_modules(tmp_path: Path) -> None:
    scheme = read({**int4_config(), "ignore": ["lm_head", "re:.*vision_tower.*", "*self_attn*"]}, tmp_path)
    assert scheme is not None
    for module in ("lm_head", "model.vision_tower.x", "model.layers.3.self_attn.q_proj"):
        assert scheme.ignores(module)
    for module in ("model.lm_head", "model.layers.3.mlp.gate_proj"):
        assert not scheme.ignores(module)


def write_modelopt_file(path: Path, **quantization: Any) -> Path:
    (path / MODELOPT_NAME).write_text(json.dumps({"producer": {}, "quantization": quantization}))
    return path


def test_the_file_of_modelopt(tmp_path: Path) -> None:
    path = write_modelopt_file(tmp_path, quant_algo="NVFP4", group_size=16, exclude_modules=["lm_head"])
    expected = Scheme(Layout.MODELOPT_NVFP4, 16, ignored=("lm_head",))
    assert read_scheme({}, path=path) == expected
    assert read({**MODELOPT, "ignore": ["lm_head"]}, path) == expected


@pytest.mark.parametrize("change", [{"quant_algo": "FP8"}, {"group_size": 32}])
def test_a_file_of_modelopt_that_cannot_be_read(change: dict[str, Any], tmp_path: Path) -> None:
    path = write_modelopt_file(tmp_path, **{"quant_algo": "NVFP4", "group_size": 16, **change})
    for config in ({}, {"quantization_config": MODELOPT}):
        with pytest.raises(UnsupportedModelError, match=rf"{MODELOPT_NAME} declares the quantisation modelopt / "):
            read_scheme(config, path=path)


def test_a_file_of_modelopt_that_is_none(tmp_path: Path) -> None:
    (tmp_path / MODELOPT_NAME).write_text("{}")
    with pytest.raises(WeightsError, match=rf"{MODELOPT_NAME}: quantization is None; expected an object"):
        read_scheme({}, path=tmp_path)


@pytest.mark.parametrize(
    ("field", "declared"),
    [
        ("transform_config", {**int4_config(), "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}),
        ("sparsity_config", {**int4_config(), "sparsity_config": {"format": "sparse-24-bitmask"}}),
        (
            "actorder",
            compressed_tensors(
                "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, actorder="group"
            ),
        ),
    ],
)
def test_fields_that_make_other_numbers_are_refused(field: str, declared: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quantization_config has {field}"):
        read(declared, tmp_path)
    assert read({**int4_config(), "transform_config": {}, "sparsity_config": {"format": "dense"}}, tmp_path)


@pytest.mark.parametrize("size", [[16], {}, "16", 16.0, True])
def test_a_group_size_is_a_number(size: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="group_size is"):
        read({**MODELOPT, "group_size": size}, tmp_path)


def test_a_file_beside_a_compressed_tensors_config_must_agree(tmp_path: Path) -> None:
    write_modelopt_file(tmp_path, quant_algo="NVFP4")
    with pytest.raises(WeightsError, match="declare different quantisations"):
        read(int4_config(), tmp_path)


def test_both_declarations_say_what_is_left_alone(tmp_path: Path) -> None:
    write_modelopt_file(tmp_path, quant_algo="NVFP4", exclude_modules=["*mlp*"])
    scheme = read({**MODELOPT, "ignore": ["model.layers.1"]}, tmp_path)
    assert scheme is not None
    modules = ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "model.layers.10.self_attn.q_proj")
    assert [scheme.ignores(module) for module in modules] == [True, True, False]
