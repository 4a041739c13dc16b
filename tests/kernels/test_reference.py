"""The torch twins against the formulas of the protocol, written out slowly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.reference import ATTENTION_ROWS, TorchKernels, soft_cap
from outrider.weights.packed import DenseWeight, quantize_int8

EXACT = TorchKernels(torch.float64)
EPS = 1e-6


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Gaussian float64 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spans(*rows: tuple[int, int, int, int, int]) -> Tensor:
    """(seat, context start, context end, fresh start, fresh end) of each row."""
    return torch.tensor(rows, dtype=torch.int32)


def slow_attention(query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """One row [H, D] over the keys and values [n, G, D] it sees."""
    heads_per_group = query.shape[0] // keys.shape[1]
    out = []
    for head, vector in enumerate(query):
        group = head // heads_per_group
        weights = torch.softmax(keys[:, group] @ vector * scale, dim=0)
        out.append(weights @ values[:, group])
    return torch.stack(out)


def test_linear_and_embed_use_the_dequantised_numbers() -> None:
    weight = quantize_int8("w", normal(5, 64), group_size=32)
    packed = EXACT.pack(weight)
    dense = weight.dequantize(torch.float64)
    x = normal(3, 64, seed=1)
    torch.testing.assert_close(EXACT.linear(x, packed), x @ dense.T)
    assert torch.equal(EXACT.embed(torch.tensor([4, 0]), packed), dense[[4, 0]])
    assert EXACT.logits(x, packed).dtype == torch.float64


def test_half_precision_keeps_its_dtype_and_sums_in_float32() -> None:
    kernels = TorchKernels(torch.bfloat16)
    x = normal(2, 256).to(torch.bfloat16)
    weight = torch.ones(256, dtype=torch.bfloat16)
    normed = kernels.rms_norm(x, weight, eps=EPS)
    expected = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, expected.to(torch.bfloat16))
    packed = kernels.pack(DenseWeight("w", normal(3, 256)))
    assert packed.dtype == torch.bfloat16
    assert kernels.logits(x, packed).dtype == torch.float32


def test_norms() -> None:
    x, weight, residual = normal(3, 10), normal(10, seed=1), normal(3, 10, seed=2)
    expected = torch.stack([row / math.sqrt(float(row @ row) / 10 + EPS) * weight for row in x])
    torch.testing.assert_close(EXACT.rms_norm(x, weight, eps=EPS), expected)
    torch.testing.assert_close(EXACT.rms_norm_add(x, weight, residual, eps=EPS), residual + expected)
    scaled = EXACT.rms_norm_add(x, weight, residual, eps=EPS, scale=0.5)
    torch.testing.assert_close(scaled, (residual + expected) * 0.5)


@pytest.mark.parametrize("with_norm", [True, False])
def test_head_norm_rope_rotates_pairs_half_a_head_apart(with_norm: bool) -> None:
    heads, positions = normal(2, 3, 8), torch.tensor([5, 0])
    weight = normal(8, seed=1) if with_norm else None
    angles = torch.arange(6, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.float64)
    out = EXACT.head_norm_rope(heads, weight, angles.cos(), angles.sin(), positions, eps=EPS)
    normed = heads if weight is None else EXACT.rms_norm(heads, weight, eps=EPS)
    turned = torch.complex(normed[..., :4], normed[..., 4:]) * torch.polar(
        torch.ones(2, 1, 4).double(), angles[positions, None]
    )
    torch.testing.assert_close(out, torch.cat([turned.real, turned.imag], dim=-1))


def test_gated_linear() -> None:
    inputs, gate_weight, up_weight = normal(2, 5) * 3, normal(9, 5, seed=1), normal(9, 5, seed=2)
    gate, up = inputs @ gate_weight.T, inputs @ up_weight.T
    silu = gate / (1 + (-gate).exp()) * up
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(EXACT.gated_linear(inputs, gate_weight, up_weight, activation="silu"), silu)
    torch.testing.assert_close(EXACT.gated_linear(inputs, gate_weight, up_weight, activation="gelu_tanh"), gelu)


def test_products_of_several_weights_with_a_residual_and_their_best() -> None:
    inputs, weights, residual = normal(2, 5), [normal(3, 5, seed=1), normal(4, 5, seed=2)], normal(2, 3, seed=3)
    for out, weight in zip(EXACT.linears(inputs, weights), weights, strict=True):
        torch.testing.assert_close(out, inputs @ weight.T)
    torch.testing.assert_close(EXACT.linear(inputs, weights[0], residual=residual), inputs @ weights[0].T + residual)
    values, indices = EXACT.best(inputs, weights[1])
    torch.testing.assert_close(values, (inputs @ weights[1].T).max(dim=1).values)
    assert indices.tolist() == (inputs @ weights[1].T).argmax(dim=1).tolist()


def test_write_cache_wraps_and_spare_rows_write_nothing() -> None:
    cache_k, cache_v = normal(2, 4, 1, 3, seed=1), normal(2, 4, 1, 3, seed=2)
    before_k, before_v = cache_k.clone(), cache_v.clone()
    keys, values = normal(3, 1, 3, seed=3), normal(3, 1, 3, seed=4)
    EXACT.write_cache(
        LayerCache.of_seats(cache_k, cache_v), keys, values, torch.tensor([-1, 1, -1]), torch.tensor([0, 6, 3])
    )
    before_k[1, 2], before_v[1, 2] = keys[1], values[1]
    assert torch.equal(cache_k, before_k)
    assert torch.equal(cache_v, before_v)
    EXACT.write_cache(
        LayerCache.of_seats(cache_k, cache_v), keys, values, torch.tensor([-1, -1, -1]), torch.tensor([0, 6, 3])
    )
    assert torch.equal(cache_k, before_k)
    assert torch.equal(cache_v, before_v)


def test_attention_sees_the_ring_then_fresh_rows() -> None:
    num_slots = 8
    history_k, history_v = normal(13, 2, 4, seed=1), normal(13, 2, 4, seed=2)
    cache_k, cache_v = (
        torch.full((3, num_slots, 2, 4), math.nan).double(),
        torch.full((3, num_slots, 2, 4), math.nan).double(),
    )
    for position in range(13):
        rows = history_k[position : position + 1], history_v[position : position + 1]
        EXACT.write_cache(LayerCache.of_seats(cache_k, cache_v), *rows, torch.tensor([1]), torch.tensor([position]))
    fresh_k, fresh_v = normal(5, 2, 4, seed=3), normal(5, 2, 4, seed=4)
    queries = normal(5, 4, 4, seed=5)
    seen = spans((1, 7, 13, 1, 3), (-1, 0, 0, 0, 0), (1, 0, 13, 0, 5), (0, 0, 0, 2, 3), (1, 12, 13, 0, 0))
    out = EXACT.attention(
        queries, LayerCache.of_seats(cache_k, cache_v), seen, scale=0.5, fresh_k=fresh_k, fresh_v=fresh_v
    )
    for row, (seat, start, end, fresh_start, fresh_end) in enumerate(seen.tolist()):
        start = max(start, end - num_slots)
        keys = torch.cat([history_k[start:end], fresh_k[fresh_start:fresh_end]])
        values = torch.cat([history_v[start:end], fresh_v[fresh_start:fresh_end]])
        expected = torch.zeros(4, 4).double() if seat < 0 else slow_attention(queries[row], keys, values, scale=0.5)
        torch.testing.assert_close(out[row], expected)


def test_pages_are_a_ring_of_positions_wherever_they_lie() -> None:
    """Three pages of four slots hold the newest 12 positions; the missing page is as if it were not there."""
    keys, values, queries = normal(17, 2, 4, seed=1), normal(17, 2, 4, seed=2), normal(3, 4, 4, seed=3)
    pools = torch.full((2, 6, 4, 2, 4), math.nan).double()
    cache = LayerCache(pools[0], pools[1], torch.tensor([[-1, -1, -1], [4, 1, 5]], dtype=torch.int32))
    for position in range(17):
        rows = keys[position : position + 1], values[position : position + 1]
        EXACT.write_cache(cache, *rows, torch.tensor([1]), torch.tensor([position]))
    assert torch.equal(cache.keys[4], keys[12:16])  # page 3 took the place of page 0
    assert torch.equal(cache.keys[1, :1], keys[16:])
    assert cache.keys[[0, 2, 3]].isnan().all()
    out = EXACT.attention(queries, cache, spans((1, 0, 17, 0, 0), (1, 9, 15, 0, 0), (0, 0, 9, 0, 0)), scale=0.5)
    for row, (start, end) in enumerate([(5, 17), (9, 15)]):
        # Position 16 took the slot of 4; 5 to 7 still lie behind it in that page.
        torch.testing.assert_close(
            out[row], slow_attention(queries[row], keys[start:end], values[start:end], scale=0.5)
        )
    assert not out[2].any()
    cache.table[1, 2] = -1
    out = EXACT.attention(queries[:1], cache, spans((1, 6, 15, 0, 0)), scale=0.5)
    seen = [6, 7, 12, 13, 14]
    torch.testing.assert_close(out[0], slow_attention(queries[0], keys[seen], values[seen], scale=0.5))


def test_attention_over_more_rows_than_are_gathered_at_a_time() -> None:
    num_rows = 2 * ATTENTION_ROWS + 3
    cache_k, cache_v, queries = normal(1, 64, 1, 4, seed=1), normal(1, 64, 1, 4, seed=2), normal(num_rows, 2, 4, seed=3)
    seen = spans(*((0, 0, row + 1, 0, 0) for row in range(num_rows)))
    out = EXACT.attention(queries, LayerCache.of_seats(cache_k, cache_v), seen, scale=1.0)
    for row in range(num_rows):
        expected = slow_attention(queries[row], cache_k[0, : row + 1], cache_v[0, : row + 1], scale=1.0)
        torch.testing.assert_close(out[row], expected)


def test_experts_are_summed_by_their_shares() -> None:
    """19 rows are more than one gathering."""
    gate_up, down = normal(5, 12, 8), normal(5, 8, 6, seed=1)
    x, shares = normal(19, 8, seed=2), normal(19, 2, seed=3)
    chosen = torch.stack([torch.arange(19) % 5, (torch.arange(19) + 2) % 5], dim=1)
    expected = torch.zeros_like(x)
    for row, slot in [(row, slot) for row in range(19) for slot in range(2)]:
        gate, up = (gate_up[chosen[row, slot]] @ x[row]).chunk(2)
        expected[row] += shares[row, slot] * (down[chosen[row, slot]] @ (functional.silu(gate) * up))
    weights = EXACT.pack_experts(DenseWeight("gate_up", gate_up), DenseWeight("down", down))
    torch.testing.assert_close(EXACT.experts(x, weights, chosen, shares, activation="silu"), expected)
    assert EXACT.experts(x[:0], weights, chosen[:0], shares[:0], activation="silu").shape == (0, 8)


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_gated(activation: str) -> None:
    x, factors = normal(3, 5), normal(3, 5, seed=1)
    activated = functional.silu(x) if activation == "silu" else functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(EXACT.gated(x, factors, activation=activation), activated * factors)


def test_soft_cap_bends_logits_and_its_absence_leaves_them() -> None:
    logits = torch.tensor([-100.0, 0.0, 2.5], dtype=torch.float64)
    expected = torch.tensor([-5.0, 0.0, 5 * math.tanh(0.5)], dtype=torch.float64)
    torch.testing.assert_close(soft_cap(logits, 5.0), expected)
    assert soft_cap(logits, None) is logits
