"""The compiled kernels against their torch twins, and one row against many, bit for bit."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.kernels import cpu
from outrider.kernels.compiler import SOURCE
from outrider.kernels.cpu import CpuKernels, chosen_num_threads
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.reference import TorchKernels
from outrider.weights.low_bit import Int4Weight
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight, quantize_int8

EXACT = TorchKernels(torch.float64)
EPS = 1e-6
MANY_ROWS = (*range(1, 17), 37)

# Sums of up to 2048 float32 products, in another order than torch's and against float64: about sqrt(2048) roundings
# of 6e-8, relative to the largest output of the tensor.
SUM_TOLERANCE = 2e-6
# A few roundings of one number: the exponential's polynomial, a division, a product or two.
ROUNDING_TOLERANCE = 1e-6


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Gaussian float32 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within tolerance of the largest element of `expected`."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def int8_weight(
    out: int, inputs: int, *, group: int, low: int = -127, high: int = 127, offsets: bool = False
) -> BlockInt8Weight:
    """Integers from low to high with scales that float16 cannot hold, as K-quants have."""
    generator = torch.Generator().manual_seed(out + inputs)
    values = torch.randint(low, high + 1, (out, inputs), dtype=torch.int8, generator=generator)
    scales = torch.rand(out, inputs // group, generator=generator) * 0.01 + 1e-4
    shift = -torch.rand(out, inputs // group, generator=generator) * 0.05 if offsets else None
    return BlockInt8Weight("weight", values, scales, shift, group)


WEIGHTS: dict[str, PackedWeight] = {
    "Q8_0": quantize_int8("weight", normal(640, 96), group_size=32),
    "Q5_0": int8_weight(128, 640, group=32, low=-16, high=15),
    "Q4_K": int8_weight(192, 1024, group=32, low=0, high=15, offsets=True),
    "Q6_K": int8_weight(64, 2048, group=16, low=-32, high=31),
    "odd outputs": int8_weight(77, 160, group=32, offsets=True),
    "one output": int8_weight(1, 32, group=32),
    "group 16 with offsets": int8_weight(130, 48, group=16, offsets=True),
    "group 8": int8_weight(66, 24, group=8),
    "dense": DenseWeight("weight", normal(130, 101)),
    "int4": Int4Weight(
        "weight",
        torch.randint(-(2**31), 2**31, (130, 12), generator=torch.Generator().manual_seed(8)).to(torch.int32),
        normal(130, 3),
        None,
        group_size=32,
    ),
    "dense bf16": DenseWeight("weight", normal(64, 64).to(torch.bfloat16)),
}
every_weight = pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())


@every_weight
def test_linear_equals_reference_and_every_row_stands_alone(cpu_kernels: CpuKernels, weight: PackedWeight) -> None:
    packed = cpu_kernels.pack(weight)
    x = normal(max(MANY_ROWS), weight.shape[1], seed=1)
    alone = torch.cat([cpu_kernels.linear(x[row : row + 1], packed) for row in range(len(x))])
    assert_near(alone, EXACT.linear(x.double(), EXACT.pack(weight)), SUM_TOLERANCE)
    for num_rows in MANY_ROWS:
        assert torch.equal(cpu_kernels.linear(x[:num_rows], packed), alone[:num_rows]), num_rows
    assert torch.equal(cpu_kernels.logits(x[5:9], packed), alone[5:9])


@every_weight
def test_embed_gives_the_exact_numbers(cpu_kernels: CpuKernels, weight: PackedWeight) -> None:
    packed = cpu_kernels.pack(weight)
    token_ids = torch.tensor([weight.shape[0] - 1, 0, weight.shape[0] // 2])
    assert torch.equal(cpu_kernels.embed(token_ids, packed), weight.dequantize(torch.float32)[token_ids])


def test_embed_refuses_ids_outside_the_table(cpu_kernels: CpuKernels) -> None:
    packed = cpu_kernels.pack(WEIGHTS["Q5_0"])
    for token_id in (-1, 128):
        with pytest.raises(IndexError, match="128 rows"):
            cpu_kernels.embed(torch.tensor([0, token_id]), packed)


def test_pack_refuses_groups_it_cannot_read(cpu_kernels: CpuKernels) -> None:
    with pytest.raises(ConfigError, match="groups of 4"):
        cpu_kernels.pack(int8_weight(4, 8, group=4))


def test_no_rows(cpu_kernels: CpuKernels) -> None:
    assert cpu_kernels.linear(torch.empty(0, 640), cpu_kernels.pack(WEIGHTS["Q5_0"])).shape == (0, 128)


@pytest.mark.parametrize("size", [1, 7, 64, 640, 647])
def test_norms(cpu_kernels: CpuKernels, size: int) -> None:
    x, weight, residual = normal(16, size), normal(size, seed=1), normal(16, size, seed=2)
    normed = cpu_kernels.rms_norm(x, weight, eps=EPS)
    added = cpu_kernels.rms_norm_add(x, weight, residual, eps=EPS)
    assert_near(normed, EXACT.rms_norm(x.double(), weight.double(), eps=EPS), ROUNDING_TOLERANCE)
    assert_near(added, EXACT.rms_norm_add(x.double(), weight.double(), residual.double(), eps=EPS), ROUNDING_TOLERANCE)
    for row in range(16):
        one = slice(row, row + 1)
        assert torch.equal(cpu_kernels.rms_norm(x[one], weight, eps=EPS), normed[one])
        assert torch.equal(cpu_kernels.rms_norm_add(x[one], weight, residual[one], eps=EPS), added[one])
    scaled = cpu_kernels.rms_norm_add(x, weight, residual, eps=EPS, scale=0.7)
    assert torch.equal(scaled, added * torch.tensor(0.7))


@pytest.mark.parametrize("size", [6, 64, 256])
@pytest.mark.parametrize("with_norm", [True, False])
def test_head_norm_rope(cpu_kernels: CpuKernels, size: int, with_norm: bool) -> None:
    heads, positions = normal(16, 3, size), torch.arange(16) * 3
    weight = normal(size, seed=1) if with_norm else None
    angles = torch.arange(48)[:, None] * torch.logspace(0, -3, size // 2)
    cos, sin = angles.cos(), angles.sin()
    out = cpu_kernels.head_norm_rope(heads, weight, cos, sin, positions, eps=EPS)
    wide_weight = None if weight is None else weight.double()
    expected = EXACT.head_norm_rope(heads.double(), wide_weight, cos.double(), sin.double(), positions, eps=EPS)
    assert_near(out, expected, ROUNDING_TOLERANCE)
    for row in range(16):
        one = slice(row, row + 1)
        assert torch.equal(cpu_kernels.head_norm_rope(heads[one], weight, cos, sin, positions[one], eps=EPS), out[one])


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize(("gate_name", "up_name"), [("odd outputs", "odd outputs"), ("Q5_0", "Q5_0 with offsets")])
def test_gated_linear(cpu_kernels: CpuKernels, activation: str, gate_name: str, up_name: str) -> None:
    weights = {**WEIGHTS, "Q5_0 with offsets": int8_weight(128, 640, group=32, offsets=True)}
    gate, up = weights[gate_name], weights[up_name]
    x = normal(max(MANY_ROWS), gate.shape[1], seed=1)
    packed_gate, packed_up = cpu_kernels.pack(gate), cpu_kernels.pack(up)
    out = cpu_kernels.gated_linear(x, packed_gate, packed_up, activation=activation)
    expected = EXACT.gated_linear(x.double(), EXACT.pack(gate), EXACT.pack(up), activation=activation)
    assert_near(out, expected, 4 * SUM_TOLERANCE)
    for num_rows in MANY_ROWS:
        some = cpu_kernels.gated_linear(x[-num_rows:], packed_gate, packed_up, activation=activation)
        assert torch.equal(some, out[-num_rows:]), num_rows


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_activation_at_the_ends_of_the_range(cpu_kernels: CpuKernels, activation: str) -> None:
    gate = torch.tensor([[0.0, -0.0, 20.0, 300.0, 1e30, -20.0, -300.0, -1e30, math.nan, math.inf]]).t()
    gates, ones = (cpu_kernels.pack(DenseWeight("weight", values)) for values in (gate, torch.ones_like(gate)))
    out = cpu_kernels.gated_linear(torch.ones(1, 1), gates, ones, activation=activation)
    expected = torch.tensor([[0.0, 0.0, 20.0, 300.0, 1e30, 0.0, 0.0, 0.0, math.nan, math.inf]])
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-6, atol=1e-7)


def test_linears_equal_one_at_a_time_in_any_mixture(cpu_kernels: CpuKernels) -> None:
    mixed = (int8_weight(77, 640, group=32, offsets=True), WEIGHTS["Q5_0"], int8_weight(640, 640, group=16))
    x, residual = normal(7, 640, seed=1), normal(7, 77, seed=2)
    packed = [cpu_kernels.pack(weight) for weight in mixed]
    for count in (1, 2, 3):
        for out, weight in zip(cpu_kernels.linears(x, packed[:count]), packed, strict=False):
            assert torch.equal(out, cpu_kernels.linear(x, weight))
    added = cpu_kernels.linear(x, packed[0], residual=residual)
    assert torch.equal(added, cpu_kernels.linear(x, packed[0]) + residual)


@every_weight
def test_best_is_the_maximum_of_the_logits(cpu_kernels: CpuKernels, weight: PackedWeight) -> None:
    packed = cpu_kernels.pack(weight)
    x = normal(max(MANY_ROWS), weight.shape[1], seed=1)
    for num_rows in MANY_ROWS:
        expected = cpu_kernels.linear(x[:num_rows], packed).max(dim=-1)
        values, indices = cpu_kernels.best(x[:num_rows], packed)
        assert torch.equal(values, expected.values)
        assert torch.equal(indices, expected.indices)


def test_best_of_ties_infinities_and_nan(cpu_kernels: CpuKernels) -> None:
    rows = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    rows[0, [130, 70, 199]] = 9.0  # ties, in different tiles
    rows[1, 150] = torch.nan
    rows[1, 20] = torch.inf
    rows[2, 199] = torch.nan  # in the tail of the last tile
    rows[3] = -torch.inf
    rows[4, 77] = torch.inf
    rows[5, [64, 65]] = 9.0
    packed = cpu_kernels.pack(DenseWeight("weight", rows.flatten()[:, None]))
    values, indices = cpu_kernels.best(torch.ones(1, 1), packed)
    assert values.isnan().all()
    assert indices.tolist() == [350]
    for row in rows:
        packed = cpu_kernels.pack(DenseWeight("weight", row[:, None]))
        values, indices = cpu_kernels.best(torch.ones(1, 1), packed)
        expected = row.max(dim=0)
        assert indices.tolist() == [int(expected.indices)]
        torch.testing.assert_close(values[0], expected.values, equal_nan=True, rtol=0, atol=0)


def test_write_cache_wraps_and_spare_rows_write_nothing(cpu_kernels: CpuKernels) -> None:
    cache_k, cache_v = normal(2, 5, 2, 3, seed=1), normal(2, 5, 2, 3, seed=2)
    expected_k, expected_v = cache_k.clone(), cache_v.clone()
    rows = normal(4, 2, 3, seed=3), normal(4, 2, 3, seed=4)
    seats, positions = torch.tensor([1, -1, 0, -1]), torch.tensor([13, 2, 4, 1])
    cpu_kernels.write_cache(LayerCache.of_seats(cache_k, cache_v), *rows, seats, positions)
    TorchKernels(torch.float32).write_cache(LayerCache.of_seats(expected_k, expected_v), *rows, seats, positions)
    assert torch.equal(cache_k, expected_k)
    assert torch.equal(cache_v, expected_v)


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 1, 256), (2, 2, 64), (4, 2, 72), (3, 1, 20), (8, 1, 37)])
def test_attention_equals_reference(cpu_kernels: CpuKernels, heads: int, groups: int, size: int) -> None:
    cache_k, cache_v = normal(3, 50, groups, size, seed=1), normal(3, 50, groups, size, seed=2)
    fresh_k, fresh_v = normal(7, groups, size, seed=3), normal(7, groups, size, seed=4)
    rows = [(1, 30, 75, 1, 5), (-1, 0, 0, 0, 0), (0, 0, 10, 0, 0), (2, 60, 99, 0, 7), (0, 0, 0, 2, 3), (0, 0, 90, 0, 0)]
    spans = torch.tensor(rows, dtype=torch.int32)
    queries = normal(len(rows), heads, size, seed=5)
    out = cpu_kernels.attention(
        queries, LayerCache.of_seats(cache_k, cache_v), spans, scale=0.1, fresh_k=fresh_k, fresh_v=fresh_v
    )
    wide = [tensor.double() for tensor in (queries, cache_k, cache_v, fresh_k, fresh_v)]
    expected = EXACT.attention(
        wide[0], LayerCache.of_seats(*wide[1:3]), spans, scale=0.1, fresh_k=wide[3], fresh_v=wide[4]
    )
    assert_near(out, expected, SUM_TOLERANCE)
    assert not out[1].any()
    for row in range(len(rows)):
        one = slice(row, row + 1)
        alone = cpu_kernels.attention(
            queries[one], LayerCache.of_seats(cache_k, cache_v), spans[one], scale=0.1, fresh_k=fresh_k, fresh_v=fresh_v
        )
        assert torch.equal(alone, out[one])


def test_attention_of_one_row_equals_n_rows_at_every_length_across_the_window_edge(cpu_kernels: CpuKernels) -> None:
    """Decoding one row at a time and verifying up to 16 at once use the same ring, and agree in every bit."""
    window, num_slots, length = 24, 24 + 16, 100
    keys, values, queries = normal(length, 1, 64, seed=1), normal(length, 1, 64, seed=2), normal(length, 4, 64, seed=3)

    def decode(num_rows: int) -> Tensor:
        cache_k, cache_v = torch.full((1, num_slots, 1, 64), math.nan), torch.full((1, num_slots, 1, 64), math.nan)
        outputs = []
        for first in range(0, length, num_rows):
            positions = torch.arange(first, min(first + num_rows, length))
            seats = torch.zeros_like(positions)
            cpu_kernels.write_cache(
                LayerCache.of_seats(cache_k, cache_v), keys[positions], values[positions], seats, positions
            )
            columns = seats, (positions + 1 - window).clamp_min(0), positions + 1, seats, seats
            spans = torch.stack(columns, dim=1).to(torch.int32)
            outputs.append(
                cpu_kernels.attention(queries[positions], LayerCache.of_seats(cache_k, cache_v), spans, scale=0.125)
            )
        return torch.cat(outputs)

    alone = decode(1)
    assert alone.isfinite().all()
    for num_rows in range(2, 17):
        assert torch.equal(decode(num_rows), alone), num_rows


def shuffled(num_slots: int, page_size: int, *, num_seats: int, seed: int) -> LayerCache:
    """A float32 cache [.., 1, 64] of NaN whose pages lie anywhere, some of them nobody's."""
    width = num_slots // page_size
    pages = torch.randperm(num_seats * width + 3, generator=torch.Generator().manual_seed(seed))
    keys, values = torch.full((2, len(pages), page_size, 1, 64), math.nan)
    return LayerCache(keys, values, pages[: num_seats * width].view(num_seats, width).to(torch.int32))


@pytest.mark.parametrize("page_size", [1, 4, 16, 48])
def test_where_pages_lie_changes_no_bit(cpu_kernels: CpuKernels, page_size: int) -> None:
    """A ring of 48 slots in one piece and in pages anywhere, over windows that wrap, for 1 to 16 rows at once."""
    window, num_slots, length, seat = 24, 48, 100, 1
    keys, values, queries = normal(length, 1, 64, seed=1), normal(length, 1, 64, seed=2), normal(length, 4, 64, seed=3)

    def decode(cache: LayerCache, num_rows: int) -> Tensor:
        outputs = []
        for first in range(0, length, num_rows):
            positions = torch.arange(first, min(first + num_rows, length))
            seats, nothing = torch.full_like(positions, seat), torch.zeros_like(positions)
            cpu_kernels.write_cache(cache, keys[positions], values[positions], seats, positions)
            columns = seats, (positions + 1 - window).clamp_min(0), positions + 1, nothing, nothing
            spans = torch.stack(columns, dim=1).to(torch.int32)
            outputs.append(cpu_kernels.attention(queries[positions], cache, spans, scale=0.125))
        return torch.cat(outputs)

    whole = decode(LayerCache.of_seats(*torch.full((2, 2, num_slots, 1, 64), math.nan)), 1)
    assert whole.isfinite().all()
    for num_rows in range(1, 17):
        cache = shuffled(num_slots, page_size, num_seats=2, seed=num_rows)
        assert torch.equal(decode(cache, num_rows), whole), num_rows


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 1, 64), (2, 2, 64), (4, 2, 72), (3, 1, 20)])
def test_pages_equal_reference_and_a_missing_one_is_never_read(
    cpu_kernels: CpuKernels, heads: int, groups: int, size: int
) -> None:
    """Page 0, which a careless read of -1 would find, and the page before the pool hold NaN."""
    pools = normal(2, 10, 4, groups, size, seed=1)
    pools[:, :2] = math.nan
    table = torch.tensor([[5, -1, 3], [-1, -1, -1], [7, 8, 2]], dtype=torch.int32)
    cache = LayerCache(pools[0, 1:], pools[1, 1:], table - (table >= 0).to(torch.int32))
    fresh_k, fresh_v = normal(3, groups, size, seed=3), normal(3, groups, size, seed=4)
    rows = [(0, 0, 12, 0, 0), (0, 2, 9, 0, 3), (1, 0, 12, 0, 0), (1, 0, 9, 1, 3), (2, 5, 19, 0, 1), (0, 4, 8, 0, 0)]
    spans, queries = torch.tensor(rows, dtype=torch.int32), normal(len(rows), heads, size, seed=5)
    out = cpu_kernels.attention(queries, cache, spans, scale=0.1, fresh_k=fresh_k, fresh_v=fresh_v)
    wide = LayerCache(cache.keys.double(), cache.values.double(), cache.table)
    expected = EXACT.attention(
        queries.double(), wide, spans, scale=0.1, fresh_k=fresh_k.double(), fresh_v=fresh_v.double()
    )
    assert_near(out, expected, SUM_TOLERANCE)
    assert not out[[2, 5]].any()

    seats, positions = torch.tensor([0, 0, 1, -1, 2, 0]), torch.tensor([11, 5, 3, 0, 16, 24])
    written, twin = (LayerCache(cache.keys.clone(), cache.values.clone(), cache.table) for _ in range(2))
    fresh = normal(6, groups, size, seed=6), normal(6, groups, size, seed=7)
    cpu_kernels.write_cache(written, *fresh, seats, positions)
    TorchKernels(torch.float32).write_cache(twin, *fresh, seats, positions)
    for ours, theirs, before in zip(written[:2], twin[:2], cache[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert int((ours != before)[1:].flatten(2).any(dim=-1).sum()) == 3  # rows 0, 4 and 5 have pages


@pytest.mark.parametrize("num_visible", range(1, 34))
def test_nan_in_slots_that_are_not_visible_does_not_leak(cpu_kernels: CpuKernels, num_visible: int) -> None:
    cache_k, cache_v = torch.full((2, 40, 1, 32), math.nan), torch.full((2, 40, 1, 32), math.nan)
    slots = torch.arange(30, 30 + num_visible) % 40
    cache_k[1, slots], cache_v[1, slots] = normal(num_visible, 1, 32), normal(num_visible, 1, 32, seed=1)
    spans = torch.tensor([[1, 30, 30 + num_visible, 0, 0]], dtype=torch.int32)
    queries = normal(1, 4, 32, seed=2)
    out = cpu_kernels.attention(queries, LayerCache.of_seats(cache_k, cache_v), spans, scale=0.2)
    expected = EXACT.attention(
        queries.double(), LayerCache.of_seats(cache_k.double(), cache_v.double()), spans, scale=0.2
    )
    assert_near(out, expected, SUM_TOLERANCE)


def test_nan_that_is_visible_is_not_hidden(cpu_kernels: CpuKernels) -> None:
    cache_k, cache_v = normal(1, 8, 1, 32), normal(1, 8, 1, 32, seed=1)
    cache_k[0, 3] = math.nan
    spans = torch.tensor([[0, 0, 8, 0, 0]], dtype=torch.int32)
    assert (
        cpu_kernels.attention(normal(1, 4, 32), LayerCache.of_seats(cache_k, cache_v), spans, scale=0.2).isnan().all()
    )


def test_calls_from_several_threads_do_not_mix(cpu_kernels: CpuKernels) -> None:
    packed = cpu_kernels.pack(int8_weight(640, 320, group=32))
    inputs = [normal(3, 320, seed=seed) for seed in range(4)]
    expected = [cpu_kernels.linear(x, packed) for x in inputs]
    wrong: list[int] = []

    def check(index: int) -> None:
        for _ in range(100):
            if not torch.equal(cpu_kernels.linear(inputs[index], packed), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=check, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_thread_count_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_THREADS", "3")
    assert chosen_num_threads() == 3
    for wrong in ("none", "0", "-1", "\u00b2", "257", "4294967297", "9" * 5000):
        monkeypatch.setenv("OUTRIDER_THREADS", wrong)
        with pytest.raises(ConfigError, match=f"OUTRIDER_THREADS='{wrong}'.*1 to 256"):
            chosen_num_threads()
    monkeypatch.delenv("OUTRIDER_THREADS")
    assert chosen_num_threads() >= 1


def test_a_machine_of_many_cores_gets_as_many_threads_as_the_pool_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_THREADS", raising=False)
    monkeypatch.setattr(cpu, "num_usable_cores", lambda: 384)
    assert chosen_num_threads() == cpu.MAX_THREADS
    assert f"#define MAX_THREADS {cpu.MAX_THREADS}\n" in SOURCE.with_name("cpu_threads.h").read_text()


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("size", [1, 7, 64, 101])
def test_gated_numbers_do_not_depend_on_where_they_stand(cpu_kernels: CpuKernels, size: int, activation: str) -> None:
    x, factors = normal(5, size), normal(5, size, seed=1)
    out = cpu_kernels.gated(x, factors, activation=activation)
    assert_near(out, EXACT.gated(x.double(), factors.double(), activation=activation), 2 * ROUNDING_TOLERANCE)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(cpu_kernels.gated(x[one], factors[one], activation=activation), out[one])


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_experts_equal_reference_and_every_row_stands_alone(cpu_kernels: CpuKernels, activation: str) -> None:
    gate_up, down = DenseWeight("gate_up", normal(6, 64, 48)), DenseWeight("down", normal(6, 48, 32, seed=1))
    x, scores = normal(19, 48, seed=2), normal(19, 6, seed=3)
    chosen, shares = scores.topk(3).indices, scores[:, :3].contiguous()
    packed = cpu_kernels.pack_experts(gate_up, down)
    out = cpu_kernels.experts(x, packed, chosen, shares, activation=activation)
    exact = EXACT.pack_experts(gate_up, down)
    expected = EXACT.experts(x.double(), exact, chosen, shares.double(), activation=activation)
    assert_near(out, expected, 4 * SUM_TOLERANCE)
    for row in range(len(x)):
        one = slice(row, row + 1)
        alone = cpu_kernels.experts(x[one], packed, chosen[one], shares[one], activation=activation)
        assert torch.equal(alone, out[one]), row
