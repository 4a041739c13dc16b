"""Weight reading and the parts that layers are made of."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from outrider.errors import WeightsError
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import rope_table
from outrider.models.config import ExpertsSpec
from outrider.models.layers import AttentionWeights, ExpertsWeights, MlpWeights, WeightReader
from outrider.weights.loader import TensorClaims
from outrider.weights.packed import DenseWeight
from tests.toy import CPU, SOURCE, dense_heads, toy_checkpoint, toy_target_config

CONFIG = toy_target_config()
KERNELS = TorchKernels(torch.float64)
EPS = CONFIG.rms_norm_eps


def reader_of(
    tensors: dict[str, DenseWeight] | None = None, *, dtype: torch.dtype = torch.float64, norm_offset: float = 1.0
) -> WeightReader:
    claims = TensorClaims(toy_checkpoint(CONFIG).tensors if tensors is None else tensors, source=SOURCE)
    return WeightReader(claims, TorchKernels(dtype), norm_offset=norm_offset, dtype=dtype, device=CPU)


def random_rows(num_rows: int = 5, size: int = 32) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_includes_its_offset_and_keeps_float32(offset: float) -> None:
    weight = DenseWeight("n", torch.tensor([0.001, -2.0], dtype=torch.bfloat16))
    norm = reader_of({"n": weight}, dtype=torch.bfloat16, norm_offset=offset).norm("n", 2)
    assert norm.dtype == torch.float32
    assert torch.equal(norm, weight.values.float() + offset)


def test_a_matrix_of_another_shape_is_named() -> None:
    weight = DenseWeight("m", torch.zeros(4, 3))
    with pytest.raises(WeightsError, match=r"m .*\(4, 3\).*\(3, 4\)"):
        reader_of({"m": weight}).linear("m", 3, 4)


@pytest.mark.parametrize("index", [0, 3])
def test_attention_projects_norms_and_rotates(index: int) -> None:
    spec, positions, rows = CONFIG.layers[index], torch.tensor([0, 3, 4, 9, 17]), random_rows()
    weights = AttentionWeights.read(
        reader_of(), f"model.layers.{index}.self_attn", spec, hidden_size=32, num_heads=CONFIG.num_heads
    )
    rope = rope_table(spec.rope, head_dim=spec.head_dim, num_positions=18, dtype=torch.float64, device=CPU)
    queries, (keys, values) = weights.queries_keys_values(rows, rope, positions, kernels=KERNELS, eps=EPS)
    written, alone = (LayerCache.of_seats(*torch.zeros(2, 1, 18, *keys.shape[1:]).double()) for _ in range(2))
    seats = torch.zeros(5, dtype=torch.int64)
    again = weights.queries(rows, rope, seats, positions, written, kernels=KERNELS, eps=EPS)
    weights.write_keys_values(rows, rope, seats, positions, alone, kernels=KERNELS, eps=EPS)
    assert torch.equal(again, queries)
    for cache in (written, alone):
        torch.testing.assert_close(cache.keys[0, positions], keys, rtol=0, atol=1e-12)
        torch.testing.assert_close(cache.values[0, positions], values, rtol=0, atol=1e-12)
    assert queries.shape == (5, 4, spec.head_dim)
    assert keys.shape == values.shape == (5, spec.num_kv_heads, spec.head_dim)
    expected = dense_heads(rows, weights.q_proj, weights.q_norm, positions, spec, EPS)
    torch.testing.assert_close(queries, expected, rtol=0, atol=1e-9)
    expected = dense_heads(rows, weights.k_proj, weights.k_norm, positions, spec, EPS)
    torch.testing.assert_close(keys, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(values.flatten(1), rows @ weights.v_proj.T, rtol=0, atol=1e-9)
    output = weights.output(queries, kernels=KERNELS)
    torch.testing.assert_close(output, queries.flatten(1) @ weights.o_proj.T, rtol=0, atol=1e-9)
    added = weights.output(queries, kernels=KERNELS, residual=rows)
    torch.testing.assert_close(added, output + rows, rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_mlp_gates(activation: str) -> None:
    mlp = MlpWeights.read(reader_of(), "model.layers.1.mlp", hidden_size=32, intermediate_size=64)
    rows = random_rows()
    gate = rows @ mlp.gate_proj.T
    gate = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    expected = (gate * (rows @ mlp.up_proj.T)) @ mlp.down_proj.T
    output = mlp.forward(rows, kernels=KERNELS, activation=activation)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-9)
    added = mlp.forward(rows, kernels=KERNELS, activation=activation, residual=rows)
    torch.testing.assert_close(added, output + rows, rtol=0, atol=1e-12)


def experts_tensors(*, one_by_one: bool) -> dict[str, DenseWeight]:
    """Router, norms and three experts of two inner features, fused or each matrix by itself."""
    generator = torch.Generator().manual_seed(5)
    sizes = {"router.scale": (4,), "router.proj.weight": (3, 4), "router.per_expert_scale": (3,)}
    norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    sizes |= {f"{name}.weight": (4,) for name in norms}
    found = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in sizes.items()}
    gate_up, down = (torch.randn(3, 4, n, generator=generator, dtype=torch.float64) for n in (4, 2))
    if one_by_one:
        for expert in range(3):
            parts = zip(("gate_proj", "up_proj", "down_proj"), (*gate_up[expert].chunk(2), down[expert]), strict=True)
            found |= {f"experts.{expert}.{name}.weight": matrix for name, matrix in parts}
    else:
        found |= {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
    return {f"l.{name}": DenseWeight(name, values) for name, values in found.items()}


def test_experts_stored_one_by_one_are_the_fused_ones() -> None:
    """Seen red: up rows before gate rows."""
    spec, outputs = ExpertsSpec(num_experts=3, num_chosen=2, intermediate_size=2), []
    for one_by_one in (True, False):
        reader = reader_of(experts_tensors(one_by_one=one_by_one))
        weights = ExpertsWeights.read(reader, "l", spec, hidden_size=4)
        assert reader.claims.finish() == []
        rows = random_rows(size=4)
        outputs.append(weights.forward(rows, rows, kernels=KERNELS, activation="gelu_tanh", eps=EPS))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)  # a stack is unpacked in float32
    assert float(outputs[0].std()) > 0.1


def test_an_expert_that_is_missing_is_named() -> None:
    tensors = experts_tensors(one_by_one=True)
    del tensors["l.experts.2.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"tensor l\.experts\.2\.up_proj\.weight is missing"):
        ExpertsWeights.read(
            reader_of(tensors), "l", ExpertsSpec(num_experts=3, num_chosen=2, intermediate_size=2), hidden_size=4
        )
