"""Tensors that make up a stored weight: whatever does not fit the declaration is refused by the tensor's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import WeightsError
from outrider.weights.layouts import Header, plan_weights
from outrider.weights.packed import DenseWeight, PackedWeight
from outrider.weights.quantization import Layout, Scheme
from outrider.weights.safetensors_dir import load_safetensors_dir
from tests.weights.low_bit_writer import CONFIGS, float8_config, int4_config, stored

NAME = "model.layers.0.mlp.up_proj.weight"
WEIGHT = torch.randn(12, 64, generator=torch.Generator().manual_seed(4))
NORM = {"model.norm.weight": torch.ones(4)}


def load(
    tensors: dict[str, Tensor], declared: dict[str, Any] | None, folder: Path, config: dict[str, Any] | None = None
) -> dict[str, PackedWeight]:
    folder.mkdir(exist_ok=True)
    save_file({**tensors, **NORM}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**(config or {}), "quantization_config": declared}))
    return dict(load_safetensors_dir(folder)[1])


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_layout_is_one_weight(layout: str, tmp_path: Path) -> None:
    tensors = stored(layout, NAME, WEIGHT) | {"model.layers.0.mlp.up_proj.input_scale": torch.tensor(1.0)}
    weights = load(tensors, CONFIGS[layout], tmp_path / "m")
    assert weights.keys() == {NAME, *NORM}  # scales of activations are not read
    assert weights[NAME].shape == (12, 64)
    assert type(weights["model.norm.weight"]) is DenseWeight


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        *((layout, "scale") for layout in CONFIGS),
        ("int4 asymmetric", "zero_point"),
        ("nvfp4", "global_scale"),
        ("modelopt", "scale_2"),
    ],
)
def test_a_missing_part_is_named(layout: str, part: str, tmp_path: Path) -> None:
    tensors = stored(layout, NAME, WEIGHT)
    del tensors[f"{NAME}_{part}"]
    with pytest.raises(WeightsError, match=rf"tensor {NAME}\w* is .*, but {NAME}_{part} is missing"):
        load(tensors, CONFIGS[layout], tmp_path / "m")


@pytest.mark.parametrize(
    ("layout", "part", "value"),
    [
        ("int4", "scale", torch.ones(12, 4)),
        ("int4", "scale", torch.ones(11, 2)),
        ("int4", "scale", torch.ones(12)),
        ("int4", "packed", torch.ones(12, 9, dtype=torch.int32)),
        ("int4", "shape", torch.ones(3, dtype=torch.int64)),
        ("int4 asymmetric", "zero_point", torch.ones(12, 2, dtype=torch.int32)),
        ("float8", "scale", torch.ones(1)),
        ("float8", "scale", torch.ones(1, 12)),
        ("nvfp4", "scale", torch.ones(12, 8).to(torch.float8_e4m3fn)),
        ("nvfp4", "global_scale", torch.ones(12)),
        ("nvfp4", "packed", torch.ones(12, 33, dtype=torch.uint8)),
        ("modelopt", "scale", torch.ones(6, 4).to(torch.float8_e4m3fn)),
    ],
)
def test_a_part_of_another_shape_is_named(layout: str, part: str, value: Tensor, tmp_path: Path) -> None:
    tensors = stored(layout, NAME, WEIGHT) | {f"{NAME}_{part}": value}
    with pytest.raises(WeightsError, match=rf"tensor {NAME}_\w+ has shape \(.*\), but {NAME}\w* of shape .* needs"):
        load(tensors, CONFIGS[layout], tmp_path / "m")


@pytest.mark.parametrize("group_size", [16, 64, 128, 48])
def test_another_group_size_than_the_declared_one_is_named(group_size: int, tmp_path: Path) -> None:
    with pytest.raises(
        WeightsError, match=rf"{NAME}_scale has shape \(12, 2\), but .* in groups of {group_size} needs"
    ):
        load(stored("int4", NAME, WEIGHT), int4_config(group_size), tmp_path / "m")


def test_another_block_than_the_declared_one_is_named(tmp_path: Path) -> None:
    declared = float8_config("block", block_structure=[4, 32])
    with pytest.raises(
        WeightsError, match=rf"{NAME}_scale has shape \(12, 1\), but .* \(4, 32\) a scale needs \(3, 2\)"
    ):
        load(stored("float8", NAME, WEIGHT), declared, tmp_path / "m")


@pytest.mark.parametrize("stated", [[64, 12], [12, 56]])
def test_a_stored_shape_that_is_wrong_is_named(stated: list[int], tmp_path: Path) -> None:
    tensors = stored("int4", NAME, WEIGHT) | {f"{NAME}_shape": torch.tensor(stated)}
    message = rf"tensor {NAME}_shape says \({stated[0]}, {stated[1]}\), but .* hold \(12, 64\)"
    with pytest.raises(WeightsError, match=message):
        load(tensors, CONFIGS["int4"], tmp_path / "m")


@pytest.mark.parametrize(
    ("layout", "part", "dtype"),
    [
        ("int4", "packed", torch.int64),
        ("int4", "scale", torch.int32),
        ("int4", "shape", torch.int32),
        ("nvfp4", "scale", torch.float32),
        ("nvfp4", "global_scale", torch.bfloat16),
        ("modelopt", "scale", torch.uint8),
        ("float8", "scale", torch.float8_e4m3fn),
    ],
)
def test_a_part_of_another_dtype_is_named(layout: str, part: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = stored(layout, NAME, WEIGHT)
    tensors[f"{NAME}_{part}"] = tensors[f"{NAME}_{part}"].to(dtype)
    with pytest.raises(WeightsError, match=rf"tensor {NAME}_{part} has dtype \w+; \S+ weights need"):
        load(tensors, CONFIGS[layout], tmp_path / "m")


@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("declared", [None, *CONFIGS])
def test_a_layout_that_is_not_the_declared_one_is_refused(layout: str, declared: str | None, tmp_path: Path) -> None:
    if layout == declared:
        return
    with pytest.raises(WeightsError, match=rf"tensor {NAME}|has no tensor stored so"):
        load(stored(layout, NAME, WEIGHT), CONFIGS.get(declared or ""), tmp_path / "m")


def test_zero_points_that_nobody_declared_are_named(tmp_path: Path) -> None:
    tensors = stored("int4 asymmetric", NAME, WEIGHT)
    with pytest.raises(WeightsError, match=rf"tensor {NAME}_zero_point is there, but config\.json declares none"):
        load(tensors, CONFIGS["int4"], tmp_path / "m")


def test_an_order_of_activations_is_refused_by_name(tmp_path: Path) -> None:
    tensors = stored("int4", NAME, WEIGHT) | {f"{NAME}_g_idx": torch.zeros(64, dtype=torch.int32)}
    with pytest.raises(WeightsError, match=rf"tensor {NAME}_g_idx is part of no packed weight"):
        load(tensors, CONFIGS["int4"], tmp_path / "m")


def test_a_declaration_without_any_packed_tensor(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"declares pack-quantized weights, but has no tensor stored so"):
        load({}, CONFIGS["int4"], tmp_path / "m")


def test_an_ignored_module_that_is_packed_is_named(tmp_path: Path) -> None:
    declared = {**CONFIGS["int4"], "ignore": [NAME.removesuffix(".weight")]}
    with pytest.raises(WeightsError, match=rf"tensor {NAME}_packed is packed, but the configuration lists its module"):
        load(stored("int4", NAME, WEIGHT), declared, tmp_path / "m")


def test_a_weight_both_plain_and_packed_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=rf"tensor {NAME} is there both plain and packed"):
        load({**stored("int4", NAME, WEIGHT), NAME: WEIGHT}, CONFIGS["int4"], tmp_path / "m")


def test_a_number_that_is_not_finite_is_named(tmp_path: Path) -> None:
    tensors = stored("float8", NAME, WEIGHT)
    tensors[NAME].view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(WeightsError, match=rf"tensor {NAME} has values that are not finite"):
        load(tensors, CONFIGS["float8"], tmp_path / "m")


def test_full_size_experts_are_planned_without_a_tensor() -> None:
    """The fused int4 experts of a 26B-A4B checkpoint (formats.md §6a)."""
    base, path = "model.language_model.layers.0.experts.gate_up_proj", Path("model-00001-of-00003.safetensors")
    headers = {
        f"{base}_packed": Header(path, "I32", (128, 1408, 352)),
        f"{base}_scale": Header(path, "BF16", (128, 1408, 88)),
        "model.language_model.layers.0.router.per_expert_scale": Header(path, "BF16", (128,)),
        "model.language_model.layers.0.router.scale": Header(path, "BF16", (2816,)),
    }
    plans = plan_weights(headers, Scheme(Layout.INT4, 32), source=path)
    assert plans[base].tensors == {"values": f"{base}_packed", "scales": f"{base}_scale"}
    assert len(plans) == 3
    with pytest.raises(WeightsError, match=r"gate_up_proj_scale has shape .* groups of 128 needs \(128, 1408, 22\)"):
        plan_weights(headers, Scheme(Layout.INT4, 128), source=path)


def test_a_plain_weight_among_packed_ones_is_named(tmp_path: Path) -> None:
    """Its like in another layer is packed, and nothing says that this one is not."""
    tensors = stored("int4", NAME, WEIGHT) | {NAME.replace(".0.", ".1."): WEIGHT}
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight is plain, while .*layers\.0.* is packed"):
        load(tensors, CONFIGS["int4"], tmp_path / "m")
    declared = {**CONFIGS["int4"], "ignore": ["model.layers.1.mlp.up_proj"]}
    assert len(load(tensors, declared, tmp_path / "n")) == 3
