"""Low-bit weights unpack to what the vendors' own libraries make of the same bytes.

The golden fixtures are made by tools/golden_low_bit.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.kernels.reference import TorchKernels
from outrider.weights.low_bit import ExpertStack, Float8Weight, Int4Weight, LowBitWeight, Nvfp4Weight
from outrider.weights.packed import DenseWeight
from outrider.weights.safetensors_dir import load_safetensors_dir
from tests.weights.low_bit_writer import E2M1, pack_nibbles

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "low_bit"
CONFIGS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "low_bit.json").read_text())["quantization_configs"]
CLASSES = {"int4": Int4Weight, "float8": Float8Weight, "nvfp4": Nvfp4Weight}


def golden(name: str, folder: Path) -> tuple[LowBitWeight, Tensor]:
    """The one weight of a fixture, loaded as a checkpoint's, and what the library made of it."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    expected = {key: tensors.pop(key) for key in list(tensors) if key.startswith("expected.")}
    ((key, values),) = expected.items()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": CONFIGS[name]}))
    _, weights = load_safetensors_dir(folder)
    assert set(weights) == {key.removeprefix("expected.")}
    weight = weights[key.removeprefix("expected.")]
    assert isinstance(weight, CLASSES[name.split("_")[0]])
    assert isinstance(weight, LowBitWeight)
    return weight, values


@pytest.mark.parametrize("name", CONFIGS)
def test_unpacks_to_the_numbers_of_the_vendors_library(name: str, tmp_path: Path) -> None:
    weight, expected = golden(name, tmp_path / "m")
    assert weight.shape == tuple(expected.shape)
    assert torch.equal(weight.dequantize(expected.dtype), expected)
    assert expected.float().std() > 0.05
    if expected.dtype == torch.float32:
        assert torch.equal(weight.values, expected)


def test_every_fixture_is_declared() -> None:
    assert {path.stem for path in GOLDEN.glob("*.safetensors")} == set(CONFIGS)
    facts = json.loads((GOLDEN / "low_bit.json").read_text())
    assert facts["compressed-tensors"]
    assert facts["nvidia-modelopt"]


def test_a_low_bit_weight_is_a_dense_one_to_those_who_know_no_better(tmp_path: Path) -> None:
    weight, expected = golden("int4_32_symmetric", tmp_path / "m")
    assert isinstance(weight, DenseWeight)
    assert torch.equal(TorchKernels(torch.bfloat16).pack(weight), expected)
    assert weight.values.dtype == torch.float32


def test_int4_by_hand() -> None:
    q = torch.tensor([[-8, -7, -1, 0, 1, 2, 3, 7, 4, 5, -2, 6]])
    zeros = torch.tensor([[1, -3]])
    scales = torch.tensor([[0.5, 2.0]])
    weight = Int4Weight("w", pack_nibbles(q + 8), scales, pack_nibbles((zeros + 8).T).T, group_size=6)
    assert weight.shape == (1, 12)  # two words, the second one half used
    expected = [-4.5, -4.0, -1.0, -0.5, 0.0, 0.5, 12.0, 20.0, 14.0, 16.0, 2.0, 18.0]
    assert weight.values.tolist() == [expected]
    symmetric = Int4Weight("w", pack_nibbles(q + 8), scales, None, group_size=6)
    assert symmetric.values.tolist() == [[-4.0, -3.5, -0.5, 0.0, 0.5, 1.0, 6.0, 14.0, 8.0, 10.0, -4.0, 12.0]]


def test_nvfp4_by_hand() -> None:
    low, high = torch.arange(16), torch.arange(15, -1, -1)
    packed = (low | high << 4).to(torch.uint8)[None]
    signed = torch.cat((E2M1, -E2M1))
    numbers = torch.stack((signed[low], signed[high]), dim=-1).view(1, 32)
    scales = torch.tensor([[0.5, 2.0]]).to(torch.float8_e4m3fn)
    expected = numbers * torch.tensor([0.5, 2.0]).repeat_interleave(16)
    multiplied = Nvfp4Weight("w", packed, scales, torch.tensor(0.25), divides=False)
    divided = Nvfp4Weight("w", packed, scales, torch.tensor(0.25), divides=True)
    assert torch.equal(multiplied.values, expected / 4)
    assert torch.equal(divided.values, expected * 4)


@pytest.mark.parametrize(("block", "shape"), [((0, 0), (1, 1)), ((1, 0), (6, 1)), ((4, 3), (2, 3))])
def test_float8_by_hand(block: tuple[int, int], shape: tuple[int, int]) -> None:
    stored = torch.arange(-21.0, 21.0).view(6, 7).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 1 + shape[0] * shape[1]).view(shape)
    weight = Float8Weight("w", stored, scales, block)
    rows, columns = block
    for o in range(6):
        for i in range(7):
            scale = scales[o // rows if rows else 0, i // columns if columns else 0]
            assert weight.values[o, i] == stored[o, i].float() * scale


def test_experts_stored_one_by_one_are_a_stack() -> None:
    """Gate rows first, then up rows, each expert with scales of its own."""
    gates, ups = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    experts = [[DenseWeight("gate", gate), DenseWeight("up", up)] for gate, up in zip(gates, ups, strict=True)]
    stack = ExpertStack("experts.gate_up_proj", experts)
    assert stack.shape == (3, 8, 8)
    assert torch.equal(stack.values, torch.cat([gates, ups], dim=1))
    assert torch.equal(stack.dequantize(torch.bfloat16), torch.cat([gates, ups], dim=1).to(torch.bfloat16))


@pytest.mark.parametrize("name", CONFIGS)
def test_without_numbers_only_shape_and_dtype_are_left(name: str, tmp_path: Path) -> None:
    golden(name, tmp_path / "m")
    _, weights = load_safetensors_dir(tmp_path / "m", without_numbers=True)
    (weight,) = weights.values()
    blank = weight.dequantize(torch.bfloat16, "meta")
    assert blank.is_meta
    assert (tuple(blank.shape), blank.dtype) == (weight.shape, torch.bfloat16)
