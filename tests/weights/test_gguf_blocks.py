"""Unpacked blocks are exact: their numbers equal those of the gguf package, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType as GgmlType

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.gguf_blocks import unpack_tensor
from outrider.weights.gguf_file import GgufFile, GgufTensor
from outrider.weights.loader import Checkpoint
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight
from tests.weights.tiny_gguf import random_blocks


def assert_same_bits(weight: PackedWeight, expected: np.ndarray) -> None:
    found = weight.dequantize(torch.float32).numpy()
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize(
    ("name", "stored_name", "kind", "group_size"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", GgmlType.Q5_0, 32),
        ("model.layers.5.mlp.gate_proj.weight", "blk.5.ffn_gate.weight", GgmlType.Q5_0, 32),
        ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight", GgmlType.Q4_K, 32),
        ("model.layers.17.self_attn.o_proj.weight", "blk.17.attn_output.weight", GgmlType.Q4_K, 32),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight", GgmlType.Q8_0, 32),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", GgmlType.Q6_K, 16),
    ],
)
def test_embedded_default_keeps_its_numbers(
    embedded_checkpoint: Checkpoint,
    embedded_gguf: GgufFile,
    name: str,
    stored_name: str,
    kind: GgmlType,
    group_size: int,
) -> None:
    stored = embedded_gguf.tensors[stored_name]
    weight = embedded_checkpoint.tensors[name]
    assert stored.type is kind
    assert isinstance(weight, BlockInt8Weight)
    assert weight.group_size == group_size
    assert_same_bits(weight, quants.dequantize(stored.raw.reshape(stored.shape[0], -1), kind))


def test_embedded_norms_are_stored_as_they_are(embedded_checkpoint: Checkpoint, embedded_gguf: GgufFile) -> None:
    weight = embedded_checkpoint.tensors["model.layers.3.input_layernorm.weight"]
    assert isinstance(weight, DenseWeight)
    assert_same_bits(weight, embedded_gguf.tensors["blk.3.attn_norm.weight"].raw.view(np.float32))


@pytest.mark.parametrize("kind", [GgmlType.Q4_0, GgmlType.Q5_0, GgmlType.Q8_0, GgmlType.Q4_K, GgmlType.Q6_K])
def test_random_blocks_keep_their_numbers(kind: GgmlType) -> None:
    raw = random_blocks(kind, (24, 512), seed=int(kind))
    weight = unpack_tensor(GgufTensor("t", kind, (24, 512), raw.reshape(-1)), name="renamed")
    assert isinstance(weight, BlockInt8Weight)
    assert weight.name == "renamed"
    assert_same_bits(weight, quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", [GgmlType.Q5_1, GgmlType.Q5_K, GgmlType.Q3_K])
def test_other_types_become_plain_numbers(kind: GgmlType) -> None:
    raw = random_blocks(kind, (4, 256), seed=1)
    raw[:, -4:] = 0  # Q3_K keeps its scale at the end
    with np.errstate(all="ignore"):
        weight = unpack_tensor(GgufTensor("t", kind, (4, 256), raw.reshape(-1)), name="t")
        expected = quants.dequantize(raw, kind)
    assert isinstance(weight, DenseWeight)
    assert_same_bits(weight, expected)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(GgmlType.F32, torch.float32), (GgmlType.F16, torch.float16), (GgmlType.BF16, torch.bfloat16)]
)
def test_floats_keep_their_type(kind: GgmlType, dtype: torch.dtype) -> None:
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = values.view(torch.uint8).numpy().reshape(-1)
    weight = unpack_tensor(GgufTensor("t", kind, (6, 8), raw), name="t")
    assert isinstance(weight, DenseWeight)
    assert weight.values.dtype is dtype
    assert torch.equal(weight.values, values)


def test_scale_that_is_not_finite_is_refused() -> None:
    raw = random_blocks(GgmlType.Q8_0, (2, 64), seed=0)
    raw[1, :2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.weight has scales that are not finite"):
        unpack_tensor(GgufTensor("blk.0.attn_q.weight", GgmlType.Q8_0, (2, 64), raw.reshape(-1)), name="x")


def test_type_without_a_decoder_is_refused() -> None:
    tensor = GgufTensor("t", GgmlType.Q8_K, (1, 256), np.zeros(292, dtype=np.uint8))
    with pytest.raises(UnsupportedModelError, match="tensor t has type Q8_K"):
        unpack_tensor(tensor, name="t")
