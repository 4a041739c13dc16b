"""The drafter against a dense recompute: full attention over context and block under an explicit mask."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.errors import WeightsError
from outrider.kernels.cpu import CpuKernels
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import LayerCache, allocate_caches
from outrider.models.dflash import DFlashDrafter, select_rows
from outrider.models.draft_layers import BlockRows
from outrider.models.drafter_config import MarkovKind, MarkovSpec
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight, quantize_int8
from tests.toy import (
    CPU,
    MASK_TOKEN_ID,
    SOURCE,
    block_logits,
    dense_attention,
    dense_heads,
    dense_norm,
    dense_values,
    toy_drafter,
    toy_drafter_config,
    toy_drafter_tensors,
    toy_target,
)

WINDOWS = [None, 3, 6]  # narrower than the block, and wider


def random_taps(num_rows: int, seed: int = 7) -> Tensor:
    return torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def new_caches(drafter: DFlashDrafter, num_seats: int = 2) -> list[LayerCache]:
    return allocate_caches(
        drafter.config.layers,
        num_seats=num_seats,
        context_length=64,
        max_rows=16,
        dtype=drafter.target.dtype,
        device=CPU,
    )


def commit(drafter: DFlashDrafter, caches: list[LayerCache], taps: Tensor, *, seat: int = 0, start: int = 0) -> None:
    positions = torch.arange(start, start + len(taps))
    drafter.write_context(taps.to(drafter.target.dtype), torch.full_like(positions, seat), positions, caches)


def block(anchor: int, start: int, *, seat: int = 0, block_rows: int = 5) -> BlockRows:
    token_ids = torch.full((block_rows,), MASK_TOKEN_ID)
    token_ids[0] = anchor
    return BlockRows(token_ids, torch.tensor([seat]), torch.tensor([start]), block_rows)


def dense_logits(drafter: DFlashDrafter, taps: Tensor, anchor: int, *, block_rows: int = 5) -> Tensor:
    """Logits [block_rows - 1, Vd] of a block after a context, everything computed at once."""
    config, eps, context = drafter.config, drafter.config.rms_norm_eps, len(taps)
    features = dense_norm(taps @ drafter.fc.T, drafter.hidden_norm, eps)
    token_ids = [anchor] + [config.mask_token_id] * (block_rows - 1)
    scale = math.sqrt(config.hidden_size) if config.embedding_scale is None else config.embedding_scale
    hidden = drafter.target.embedding[token_ids] * scale
    positions = torch.arange(context + block_rows)
    ages = positions[context:, None] - positions
    for layer in drafter.layers:
        spec, attention, mlp = layer.spec, layer.attention, layer.mlp
        normed = dense_norm(hidden, layer.input_norm, eps)
        seen = torch.cat([features, normed])
        mask = ages < (spec.window or len(positions))
        if layer.sight.is_causal:
            mask = mask & (ages >= 0)
        attended = dense_attention(
            dense_heads(normed, attention.q_proj, attention.q_norm, positions[context:], spec, eps),
            dense_heads(seen, attention.k_proj, attention.k_norm, positions, spec, eps),
            dense_values(seen, attention, spec),
            mask,
            scale=spec.head_dim**-0.5,
        )
        hidden = hidden + attended @ attention.o_proj.T
        normed = dense_norm(hidden, layer.post_attention_norm, eps)
        hidden = hidden + (functional.silu(normed @ mlp.gate_proj.T) * (normed @ mlp.up_proj.T)) @ mlp.down_proj.T
    logits = dense_norm(hidden[1:], drafter.final_norm, eps) @ drafter.target.embedding.T
    return logits if drafter.draft_to_target is None else logits[:, drafter.draft_to_target]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("context", [1, 2, 9, 40])
def test_forward_agrees_with_a_dense_recompute(window: int | None, is_causal: bool, context: int) -> None:
    drafter = toy_drafter(toy_target(), is_causal=is_causal, window=window)
    caches, taps = new_caches(drafter), random_taps(context)
    for start in range(0, context, 7):
        commit(drafter, caches, taps[start : start + 7], start=start)
    logits = block_logits(drafter, block(11, context), caches)
    assert logits.shape == (1, 4, 96)
    torch.testing.assert_close(logits[0], dense_logits(drafter, taps, 11), rtol=0, atol=1e-9)


def test_compiled_kernels_agree_too(cpu_kernels: CpuKernels) -> None:
    exact = toy_drafter(toy_target(), window=6)
    drafter = toy_drafter(toy_target(kernels=cpu_kernels, dtype=torch.float32), window=6)
    caches, taps = new_caches(drafter), random_taps(9)
    commit(drafter, caches, taps)
    logits = block_logits(drafter, block(11, 9), caches)[0].to(torch.float64)
    torch.testing.assert_close(logits, dense_logits(exact, taps, 11), rtol=0, atol=1e-3)


def test_a_shorter_block_is_a_block_of_fewer_slots() -> None:
    drafter = toy_drafter(toy_target())
    caches, taps = new_caches(drafter), random_taps(9)
    commit(drafter, caches, taps)
    logits = block_logits(drafter, block(11, 9, block_rows=3), caches)
    torch.testing.assert_close(logits[0], dense_logits(drafter, taps, 11, block_rows=3), rtol=0, atol=1e-9)


@pytest.mark.parametrize("draft_vocab_size", [None, 48])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_best_is_the_argmax_of_forward(
    cpu_kernels: CpuKernels, draft_vocab_size: int | None, is_compiled: bool
) -> None:
    target = toy_target(kernels=cpu_kernels, dtype=torch.float32) if is_compiled else toy_target()
    drafter = toy_drafter(target, draft_vocab_size=draft_vocab_size)
    caches = new_caches(drafter)
    commit(drafter, caches, random_taps(9))
    for anchor in range(8):
        logits = block_logits(drafter, block(anchor, 9), caches)
        assert drafter.best(block(anchor, 9), caches).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("is_causal", [False, True])
def test_only_two_way_slots_see_later_ones(is_causal: bool) -> None:
    drafter = toy_drafter(toy_target(), is_causal=is_causal)
    caches = new_caches(drafter)
    commit(drafter, caches, random_taps(9))
    short, long = (block_logits(drafter, block(11, 9, block_rows=rows), caches)[0, :2] for rows in (3, 5))
    assert torch.allclose(short, long, rtol=0, atol=1e-9) == is_causal


def test_requests_of_a_batch_do_not_see_each_other() -> None:
    drafter = toy_drafter(toy_target(), window=6)
    caches = new_caches(drafter)
    first, second = random_taps(9, seed=1), random_taps(4, seed=2)
    commit(drafter, caches, first, seat=1)
    commit(drafter, caches, second, seat=0)
    rows = [block(11, 9, seat=1), block(12, 4, seat=0)]
    both = BlockRows(*(torch.cat([getattr(row, name) for row in rows]) for name in ("token_ids", "seats", "starts")), 5)
    logits = block_logits(drafter, both, caches)
    torch.testing.assert_close(logits[0], dense_logits(drafter, first, 11), rtol=0, atol=1e-9)
    torch.testing.assert_close(logits[1], dense_logits(drafter, second, 12), rtol=0, atol=1e-9)


def test_unscaled_block_embeddings() -> None:
    drafter = toy_drafter(toy_target(), scale_block_embeddings=False)
    caches, taps = new_caches(drafter), random_taps(9)
    commit(drafter, caches, taps)
    logits = block_logits(drafter, block(11, 9), caches)[0]
    torch.testing.assert_close(logits, dense_logits(drafter, taps, 11), rtol=0, atol=1e-9)
    scaled = dense_logits(toy_drafter(toy_target()), taps, 11)
    assert not torch.allclose(logits, scaled, rtol=0, atol=1e-3)


def test_reduced_vocabulary_takes_rows_of_the_targets_head() -> None:
    target = toy_target()
    whole, reduced = toy_drafter(target), toy_drafter(target, draft_vocab_size=48)
    assert reduced.draft_to_target is not None
    assert reduced.draft_to_target.tolist() == list(range(0, 96, 2))
    logits = []
    for drafter in (whole, reduced):
        caches = new_caches(drafter)
        commit(drafter, caches, random_taps(9))
        logits.append(block_logits(drafter, block(11, 9), caches))
    torch.testing.assert_close(logits[1], logits[0][..., ::2], rtol=0, atol=1e-9)


def with_d2t(first_offset: int) -> DFlashDrafter:
    """Draft id 0 means target id `first_offset`, every other id means itself."""
    config, target = toy_drafter_config(draft_vocab_size=48), toy_target()
    table = torch.zeros(48, dtype=torch.int64)
    table[0] = first_offset
    tensors = toy_drafter_tensors(config) | {"d2t": DenseWeight("d2t", table)}
    return DFlashDrafter(config, tensors, target, kernels=target.kernels, context_length=8, source=SOURCE)


def test_d2t_holds_differences() -> None:
    table = with_d2t(90).draft_to_target
    assert table is not None
    assert table[:3].tolist() == [90, 1, 2]


@pytest.mark.parametrize("first_offset", [-1, 1, 96])
def test_a_d2t_table_that_maps_outside_or_twice_is_refused(first_offset: int) -> None:
    with pytest.raises(WeightsError, match="d2t"):
        with_d2t(first_offset)


@pytest.mark.parametrize("is_right", [True, False])
def test_t2d_must_be_the_mask_of_d2t(is_right: bool) -> None:
    """speculators writes both; a t2d of other tokens means that the two files do not belong together."""
    target, config = toy_target(), toy_drafter_config(draft_vocab_size=48)
    flags = torch.arange(96) % 2 == (0 if is_right else 1)
    tensors = toy_drafter_tensors(config) | {"t2d": DenseWeight("t2d", flags)}
    options = {"kernels": target.kernels, "context_length": 64, "source": SOURCE}
    if is_right:
        assert DFlashDrafter(config, tensors, target, **options).draft_to_target is not None  # type: ignore[arg-type]
        return
    with pytest.raises(WeightsError, match="d2t and t2d of toy name different tokens"):
        DFlashDrafter(config, tensors, target, **options)  # type: ignore[arg-type]


def test_a_block_that_is_discarded_leaves_no_trace() -> None:
    """T-012: scratch rows never reach the caches; committing appends exactly the committed rows."""
    drafter = toy_drafter(toy_target())
    caches = new_caches(drafter)
    commit(drafter, caches, random_taps(9))
    before = snapshot(caches)
    first, second = (block_logits(drafter, block(11, 9), caches) for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(snapshot(caches), before, strict=True))
    commit(drafter, caches, random_taps(2, seed=8), start=9)
    for ours, theirs in zip(snapshot(caches), before, strict=True):
        changed = (ours != theirs).flatten(2).any(dim=2)
        assert changed.nonzero().tolist() == [[0, 9], [0, 10]]


def snapshot(caches: list[LayerCache]) -> list[Tensor]:
    return [tensor.clone() for cache in caches for tensor in cache[:2]]


def test_selected_rows_keep_their_format() -> None:
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([4, 0])
    packed = quantize_int8("head", values, group_size=32)
    with_offsets = BlockInt8Weight("head", packed.values, packed.scales, torch.ones_like(packed.scales), 32)
    for weight in (DenseWeight("head", values), packed, with_offsets):
        selected = select_rows(weight, ids)
        assert type(selected) is type(weight)
        assert torch.equal(selected.dequantize(torch.float32), weight.dequantize(torch.float32)[ids])


class NotingKernels(TorchKernels):
    """Torch's, which notes what it is given to pack."""

    def __init__(self, *, reads_low_bit: bool) -> None:
        super().__init__(torch.float64)
        self.reads_low_bit = reads_low_bit
        self.packed: dict[str, PackedWeight] = {}

    def pack(self, weight: PackedWeight) -> Tensor:
        self.packed[weight.name] = weight
        return super().pack(weight)


@pytest.mark.parametrize("reads_low_bit", [False, True])
def test_projections_and_head_are_quantised_and_nothing_else(reads_low_bit: bool) -> None:
    target, kernels = toy_target(), NotingKernels(reads_low_bit=reads_low_bit)
    config = toy_drafter_config()
    tensors = toy_drafter_tensors(config)
    drafter = DFlashDrafter(
        config, tensors, target, kernels=kernels, context_length=8, source=SOURCE, quantization="int8"
    )
    matrices = {name for name, weight in tensors.items() if len(weight.shape) == 2}
    assert len(matrices) == 2 * 7 + 1
    assert kernels.packed.keys() == matrices | ({"lm_head.weight"} if reads_low_bit else set())
    assert all(isinstance(weight, BlockInt8Weight) for weight in kernels.packed.values())
    assert (drafter.head is target.embedding) != reads_low_bit
    assert drafter.embedding is target.embedding
    torch.testing.assert_close(drafter.head, target.embedding, atol=0.02, rtol=0.0)
    assert not torch.equal(drafter.fc, tensors["fc.weight"].dequantize(torch.float64))


def test_a_head_of_its_own_is_quantised_and_markov_weights_are_not() -> None:
    target, kernels = toy_target(), NotingKernels(reads_low_bit=False)
    config = replace(toy_drafter_config(), markov=MarkovSpec(kind=MarkovKind.VANILLA, rank=32))
    own = {
        name: DenseWeight(name, torch.randn(96, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
        for name in ("lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    }
    tensors = toy_drafter_tensors(config) | own
    DFlashDrafter(config, tensors, target, kernels=kernels, context_length=8, source=SOURCE, quantization="int4")
    assert isinstance(kernels.packed["lm_head.weight"], BlockInt8Weight)
    assert all(kernels.packed[name] is own[name] for name in own if name.startswith("markov_head"))
