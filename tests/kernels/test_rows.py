"""Row kernels joined to their twins, and each row alone against the same row in company.

Seen red: the mean over more than the row; a rotation of values; the slot without mod P; the ring without mod W; spare
rows that write; half the gate's factor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.kernels import rows
from outrider.kernels.heads import HeadNorms, HeadRows
from outrider.kernels.layer_cache import LayerCache
from tests.kernels.triton_mode import DEVICE, DTYPE, TWIN, assert_near, ids, normal

pytestmark = pytest.mark.filterwarnings("ignore")
EPS = 1e-6
NUM_HEADS, NUM_GROUPS, PAGE_SIZE = 2, 1, 4


def factors(*shape: int, seed: int) -> Tensor:
    """Norm weights and rotary tables are float32."""
    return normal(*shape, seed=seed, dtype=torch.float32)


def new_cache(head_size: int) -> LayerCache:
    """Nine pages, seats 1 and 2 with some of them."""
    pools = torch.zeros(2, 9, PAGE_SIZE, NUM_GROUPS, head_size, device=DEVICE, dtype=DTYPE)
    return LayerCache(*pools, torch.tensor([[-1] * 3, [4, 1, 5], [2, -1, 7]], dtype=torch.int32, device=DEVICE))


def check_norms(size: int) -> None:
    wide, residual = normal(3, size + 6), normal(3, size, seed=1)
    inputs, weight, following = wide[:, 2 : size + 2], factors(size, seed=2), factors(size, seed=3)
    assert_near(rows.rms_norm(inputs, weight, eps=EPS), TWIN.rms_norm(inputs, weight, eps=EPS))
    for scale in (1.0, 0.7):
        ours = rows.rms_norm_add_norm(inputs, weight, residual, following, eps=EPS, scale=scale)
        exact = TWIN.rms_norm_add_norm(inputs, weight, residual, following, eps=EPS, scale=scale)
        assert_near(ours[0], exact[0])
        assert_near(ours[1], exact[1])
        assert torch.equal(rows.rms_norm_add(inputs, weight, residual, eps=EPS, scale=scale), ours[0])
        alone = rows.rms_norm_add_norm(inputs[1:2], weight, residual[1:2], following, eps=EPS, scale=scale)
        assert torch.equal(torch.cat(alone), torch.stack([each[1] for each in ours]))


@pytest.mark.parametrize("size", [64, 270])
def test_norms_of_any_size(size: int) -> None:
    check_norms(size)


def test_a_norm_over_heads_keeps_their_shape() -> None:
    heads, weight = normal(3, 2, 24), factors(24, seed=1)
    assert_near(rows.rms_norm(heads, weight, eps=EPS), TWIN.rms_norm(heads, weight, eps=EPS))
    assert rows.rms_norm(heads[:0], weight, eps=EPS).shape == (0, 2, 24)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(activation: str) -> None:
    inputs, up = normal(3, 1200)[:, :1100] * 4, normal(3, 1100, seed=1)
    ours = rows.gated(inputs, up, activation=activation)
    assert_near(ours, TWIN.gated(inputs, up, activation=activation))
    assert torch.equal(rows.gated(inputs[2:], up[2:], activation=activation), ours[2:])


def test_embedding_with_a_factor() -> None:
    table, token_ids = normal(50, 1100), ids(3, 49, 0, 3)
    assert_near(rows.embed(token_ids, table, scale=3.3), TWIN.embed(token_ids, table, scale=3.3))
    assert torch.equal(rows.embed(token_ids, table), table[token_ids])


def check_heads(head_size: int, *, num_heads: int = NUM_HEADS, rotates_only: bool = False) -> None:
    """Slices of one product: all three to the cache, values that are keys, queries alone, and none to a cache."""
    q_size, kv_size = num_heads * head_size, NUM_GROUPS * head_size
    queries, keys, values = normal(5, q_size + 2 * kv_size).split([q_size, kv_size, kv_size], dim=1)
    cos, sin = factors(40, head_size // 2, seed=1), factors(40, head_size // 2, seed=2)
    norms = HeadNorms(*(factors(head_size, seed=3 + each) for each in range(3)))
    norms = HeadNorms(norms.queries, norms.keys, None) if rotates_only else norms
    positions, seats = ids(5, 14, 7, 3, 12), ids(1, 1, 2, -1, 2)
    for made in (HeadRows(queries, keys, values), HeadRows(None, keys, keys), HeadRows(queries, None, None)):
        dense = HeadRows(*(None if each is None else each.contiguous() for each in made))
        for options, same in (({}, {}), *[({"cache": new_cache(head_size), "seats": seats},) * 2]):
            same = {**same, "cache": new_cache(head_size)} if same else same
            ours = rows.finish_heads(made, norms, cos, sin, positions, eps=EPS, **options)
            exact = TWIN.finish_heads(dense, norms, cos, sin, positions, eps=EPS, **same)
            pairs = list(zip(ours, exact, strict=True))
            pairs += zip(options["cache"][:2], same["cache"][:2], strict=True) if options else []
            for our, their in pairs:
                assert (our is None) == (their is None)
                if our is not None:
                    assert_near(our, their)
            if options:
                written = (options["cache"].keys != 0).any(-1).sum().item()
                assert written == (0 if made.keys is None else 3 * NUM_GROUPS), "two rows have no page"


@pytest.mark.parametrize("head_size", [16, 24])
def test_heads_reach_queries_and_pages(head_size: int) -> None:
    check_heads(head_size)


def test_heads_without_a_norm_of_values() -> None:
    check_heads(16, rotates_only=True)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [640, 5376])
def test_norms_at_full_size(size: int) -> None:
    check_norms(size)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_size", "num_heads"), [(128, 64), (256, 32), (512, 32)])
def test_heads_at_full_size(head_size: int, num_heads: int) -> None:
    check_heads(head_size, num_heads=num_heads)
