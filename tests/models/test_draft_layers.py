"""What rows of a block see, and the layers of Gemma 4 drafters, against formulae written out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.layer_cache import LayerCache
from outrider.models.attention import RopeTable, rope_table
from outrider.models.draft_layers import BlockRows, Gemma4DraftLayer, Sight
from tests.toy import dense_attention, dense_norm, dense_rope, toy_drafter, toy_dspark, toy_target

BLOCK = BlockRows(torch.zeros(5, dtype=torch.int64), torch.tensor([0]), torch.tensor([9]), 5)


def spans(window: int | None, is_causal: bool, *, from_anchor: bool = False) -> list[list[int]]:
    return Sight(window, is_causal, from_anchor).spans(BLOCK)[:, 1:].tolist()


def test_positions_follow_the_anchor() -> None:
    two = BlockRows(torch.zeros(6, dtype=torch.int64), torch.tensor([1, 0]), torch.tensor([9, 4]), 3)
    assert two.positions.tolist() == [9, 10, 11, 4, 5, 6]
    assert Sight(None, False, False).spans(two)[:, [0, 2, 3, 4]].tolist() == [[1, 9, 0, 3]] * 3 + [[0, 4, 3, 6]] * 3


def test_a_window_that_ends_inside_the_block() -> None:
    assert spans(3, False) == [[7, 9, 0, 5], [8, 9, 0, 5], [9, 9, 0, 5], [9, 9, 1, 5], [9, 9, 2, 5]]
    assert [row[3] for row in spans(None, True)] == [1, 2, 3, 4, 5]


def test_a_window_from_the_anchor_is_the_same_for_every_slot() -> None:
    assert spans(3, False, from_anchor=True) == [[6, 9, 0, 5]] * 5
    assert spans(3, True, from_anchor=True) == [[6, 9, 0, end] for end in range(1, 6)]
    assert spans(20, False, from_anchor=True) == [[0, 9, 0, 5]] * 5


def test_layers_keep_what_their_config_declares() -> None:
    drafter = toy_drafter(toy_target(), window=3, is_causal=True)
    assert [layer.sight for layer in drafter.layers] == [Sight(3, True, False)] * 2


def values_of(inputs: Tensor, layer: Gemma4DraftLayer) -> Tensor:
    raw = (inputs @ layer.attention.k_proj.T).unflatten(-1, (1, 16))
    return dense_norm(raw, torch.ones(16, dtype=torch.float64), 1e-6)


def heads_of(inputs: Tensor, weight: Tensor, norm: Tensor, positions: Tensor, layer: Gemma4DraftLayer) -> Tensor:
    raw = (inputs @ weight.T).unflatten(-1, (-1, 16))
    return dense_rope(dense_norm(raw, norm, 1e-6), positions, layer.spec.rope)


def test_a_gemma4_layer_is_its_formula() -> None:
    """formats.md §1.1 and §3.1: four norms, V = norm of the raw keys, scale 1, tanh GELU, layer scalar."""
    target = toy_target()
    drafter = toy_dspark(target)
    kernels, layer = target.kernels, drafter.layers[0]
    assert isinstance(layer, Gemma4DraftLayer)
    generator = torch.Generator().manual_seed(0)
    features, hidden = (torch.randn(n, 32, generator=generator, dtype=torch.float64) for n in (4, 3))
    context, block = torch.arange(4), torch.arange(4, 7)

    normed = dense_norm(hidden, layer.input_norm, 1e-6)
    attention, seen = layer.attention, torch.cat([features, normed])
    attended = dense_attention(
        heads_of(normed, attention.q_proj, attention.q_norm, block, layer),
        heads_of(seen, attention.k_proj, attention.k_norm, torch.cat([context, block]), layer),
        values_of(seen, layer),
        torch.ones(3, 7, dtype=torch.bool),
        scale=1.0,
    )
    expected = hidden + dense_norm(attended @ attention.o_proj.T, layer.post_attention_norm, 1e-6)
    fed = dense_norm(expected, layer.pre_feedforward_norm, 1e-6)
    gated = functional.gelu(fed @ layer.mlp.gate_proj.T, approximate="tanh") * (fed @ layer.mlp.up_proj.T)
    expected = expected + dense_norm(gated @ layer.mlp.down_proj.T, layer.post_feedforward_norm, 1e-6)
    expected = expected * layer.scalar

    rope: RopeTable = rope_table(layer.spec.rope, head_dim=16, num_positions=8, dtype=torch.float64, device="cpu")
    options = {"kernels": kernels, "eps": 1e-6}
    queries, fresh = attention.queries_keys_values(normed, rope, block, **options)  # type: ignore[arg-type]
    cache = LayerCache.of_seats(*torch.zeros(2, 1, 4, *fresh.keys.shape[1:], dtype=torch.float64))
    attention.write_keys_values(features, rope, context * 0, context, cache, **options)  # type: ignore[arg-type]
    ends = torch.tensor([[0, 0, 4, 0, 3]] * 3, dtype=torch.int32)
    ours = kernels.attention(
        queries,
        cache,
        ends,
        scale=1.0,
        fresh_k=fresh.keys,
        fresh_v=fresh.values,
    )
    ours = layer.after_attention(ours, hidden, kernels=kernels, activation="gelu_tanh", eps=1e-6)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    assert abs(layer.scalar - 1.0) > 0.1
