"""DSpark's heads: formulae written out, and the walk over candidates against the whole vocabulary.

Seen red: the bias by the slot's own token, a state that is not carried on, the soft-cap over base and bias together,
w1 read by target id where it goes by draft id.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.errors import WeightsError
from outrider.kernels.cpu import CpuKernels
from outrider.models.attention import LayerCaches, allocate_caches
from outrider.models.dflash import DFlashDrafter
from outrider.models.draft_layers import BlockRows
from outrider.models.drafter_config import BlockLayout, MarkovKind
from outrider.models.gemma import GemmaTarget
from outrider.weights.packed import DenseWeight
from tests.toy import TAP_LAYERS, toy_dspark, toy_target

KINDS = pytest.mark.parametrize("kind", list(MarkovKind))
NUM_DRAFTS = 4


def drafting(drafter: DFlashDrafter) -> tuple[BlockRows, LayerCaches]:
    """A block for each of two requests, after 6 rows of noise."""
    target = drafter.target
    caches = allocate_caches(
        drafter.config.layers, num_seats=2, context_length=64, max_rows=16, dtype=target.dtype, device="cpu"
    )
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(12, 32 * len(TAP_LAYERS), generator=generator, dtype=torch.float64).to(target.dtype)
    drafter.write_context(taps, torch.arange(12) // 6, torch.arange(12) % 6, caches)
    anchors, starts = torch.tensor([20, 33]), torch.tensor([6, 6])
    return drafter.block(anchors, torch.arange(2), starts, num_drafts=NUM_DRAFTS), caches


def formula(drafter: DFlashDrafter, kind: MarkovKind, hidden: Tensor, previous: Tensor) -> Tensor:
    """Bias [K, V] of one request's slots, from hidden [K, N] and the tokens before them."""
    head = drafter.markov
    assert head is not None
    state, rows = torch.zeros(6, dtype=torch.float64), []
    for state_in, token in zip(hidden, previous.tolist(), strict=True):
        embedded = head.w1[token]
        if kind is MarkovKind.VANILLA:
            latent = embedded
        elif kind is MarkovKind.GATED:
            assert head.joint is not None
            latent = torch.sigmoid(head.joint.weight @ torch.cat([state_in, embedded]) + head.joint.bias) * embedded
        else:
            assert head.joint is not None
            joined = head.joint.weight @ torch.cat([state, embedded, state_in]) + head.joint.bias
            gate = torch.sigmoid(joined[:6])
            state, latent = gate * state + (1 - gate) * torch.tanh(joined[6:12]), torch.tanh(joined[12:])
        rows.append(head.w2 @ latent)
    return torch.stack(rows)


@KINDS
@pytest.mark.parametrize("layout", list(BlockLayout))
def test_draft_logits_are_base_logits_and_bias(kind: MarkovKind, layout: BlockLayout) -> None:
    drafter = toy_dspark(toy_target(), kind=kind, layout=layout)
    block, caches = drafting(drafter)
    hidden = drafter.hidden(block, caches)
    assert hidden.shape == (2, NUM_DRAFTS, 32)
    previous = torch.tensor([[20, 3, 4, 5], [33, 6, 7, 3]])
    logits, chances = drafter.draft_logits(block, caches, previous)
    base = drafter.base_logits(hidden)
    assert base.abs().max() < 5.0  # capped, and the bias is not
    assert drafter.confidence is not None
    assert drafter.markov is not None
    assert chances is not None
    for request in range(2):
        bias = formula(drafter, kind, hidden[request], previous[request])
        torch.testing.assert_close(logits[request], base[request] + bias, rtol=0, atol=1e-10)
        inputs = torch.cat([hidden[request], drafter.markov.w1[previous[request]]], dim=-1)
        expected = torch.sigmoid(inputs @ drafter.confidence.proj.weight[0] + drafter.confidence.proj.bias)
        torch.testing.assert_close(chances[request], expected, rtol=0, atol=1e-10)


def test_the_first_draft_comes_from_the_anchors_slot_where_the_layout_says_so() -> None:
    """One slot less for the same number of drafts, and slot 0 counts."""
    blocks = {}
    for layout in BlockLayout:
        drafter = toy_dspark(toy_target(), layout=layout)
        block, caches = drafting(drafter)
        blocks[layout] = (block.block_rows, drafter.hidden(block, caches))
    assert [rows for rows, _ in blocks.values()] == [NUM_DRAFTS + 1, NUM_DRAFTS]
    drafter = toy_dspark(toy_target(), layout=BlockLayout.SAME_POSITION)
    _, caches = drafting(drafter)
    whole = drafter.block(torch.tensor([20]), torch.tensor([0]), torch.tensor([6]), num_drafts=NUM_DRAFTS - 1)
    assert whole.block_rows == NUM_DRAFTS
    alike = drafter.hidden(whole, caches)[0]
    torch.testing.assert_close(alike, blocks[BlockLayout.NEXT_POSITION][1][0, 1:], rtol=0, atol=1e-10)


def targets(cpu_kernels: CpuKernels, is_compiled: bool) -> GemmaTarget:
    return toy_target(kernels=cpu_kernels, dtype=torch.float32) if is_compiled else toy_target()


@KINDS
@pytest.mark.parametrize("draft_vocab_size", [None, 48])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_walk_is_its_plain_twin_on_its_candidates(
    cpu_kernels: CpuKernels, kind: MarkovKind, draft_vocab_size: int | None, is_compiled: bool
) -> None:
    drafter = toy_dspark(targets(cpu_kernels, is_compiled), kind=kind, draft_vocab_size=draft_vocab_size)
    block, caches = drafting(drafter)
    walk = drafter.walk(block, caches, num_candidates=10)
    previous, steps = [torch.tensor([20, 33])], []
    for _ in range(walk.num_drafts):
        steps.append(walk.step(previous[-1]))
        previous.append(steps[-1].ids[:, 3])  # any candidate will do
    logits, chances = drafter.draft_logits(block, caches, torch.stack(previous[:-1], dim=1))
    assert chances is not None
    table = torch.arange(96) if drafter.draft_to_target is None else drafter.draft_to_target
    best = drafter.base_logits(drafter.hidden(block, caches)).topk(10, dim=-1).indices
    for slot, step in enumerate(steps):
        assert (step.logits.diff(dim=-1) <= 0).all()
        for request in range(2):
            assert set(step.ids[request].tolist()) == set(table[best[request, slot]].tolist())
        draft_ids = (step.ids[..., None] == table).int().argmax(dim=-1)
        torch.testing.assert_close(step.logits, logits[:, slot].gather(1, draft_ids), rtol=0, atol=1e-4)
        torch.testing.assert_close(step.confidence, chances[:, slot], rtol=0, atol=1e-4)


def test_w1_may_go_by_draft_ids_with_a_row_for_all_others() -> None:
    """The same head in both forms: rows of tokens that cannot be drafted must be one and the same (design §4.5)."""
    target = toy_target()
    by_draft_id = toy_dspark(target, draft_vocab_size=48, w1_by_draft_id=True)
    assert by_draft_id.markov is not None
    assert by_draft_id.draft_to_target is not None
    rows = by_draft_id.markov.w1[-1].repeat(96, 1)
    rows[by_draft_id.draft_to_target] = by_draft_id.markov.w1[:-1]
    name = "markov_head.markov_w1.weight"
    by_target_id = toy_dspark(target, draft_vocab_size=48, changed={name: DenseWeight(name, rows)})
    previous = torch.tensor([[20, 2, 4, 6], [33, 8, 10, 31]])  # 33 and 31 cannot be drafted
    logits = [
        drafter.draft_logits(*drafting(drafter), previous_token_ids=previous)[0]
        for drafter in (by_draft_id, by_target_id)
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-12)


def test_a_confidence_head_may_do_without_the_markov_embedding() -> None:
    drafter = toy_dspark(toy_target(), reads_markov=False)
    block, caches = drafting(drafter)
    previous = torch.tensor([[20, 3, 4, 5], [33, 6, 7, 3]])
    chances = [drafter.draft_logits(block, caches, each)[1] for each in (previous, previous.flip(0))]
    assert chances[0] is not None
    assert chances[1] is not None
    assert torch.equal(chances[0], chances[1])


@pytest.mark.parametrize("missing", ["markov_head.markov_w2.weight", "confidence_head.proj.bias"])
def test_a_head_that_is_not_there_is_named(missing: str) -> None:
    wrong = DenseWeight(missing, torch.zeros(3, 3))
    with pytest.raises(WeightsError, match=missing):
        toy_dspark(toy_target(), changed={missing: wrong})


def table(name: str, *shape: int, seed: int = 9) -> dict[str, DenseWeight]:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {name: DenseWeight(name, values)}


def test_a_drafter_may_bring_its_own_embedding_and_head() -> None:
    target = toy_target()
    own = table("embed_tokens.weight", 96, 32) | table("lm_head.weight", 96, 32, seed=10)
    drafter = toy_dspark(target, changed=own)
    assert torch.equal(drafter.embedding, own["embed_tokens.weight"].values)
    assert torch.equal(drafter.head, own["lm_head.weight"].values)
    hidden = [each.hidden(*drafting(each)) for each in (drafter, toy_dspark(target))]
    assert not torch.allclose(*hidden)


def test_a_copy_of_the_targets_table_is_kept_once() -> None:
    target = toy_target()
    names = ("embed_tokens.weight", "lm_head.weight")
    copies = {name: DenseWeight(name, target.stored_embedding.dequantize(torch.float64).clone()) for name in names}
    drafter = toy_dspark(target, changed=copies)
    assert drafter.embedding is target.embedding
    assert drafter.head is target.embedding


def test_a_reduced_drafter_may_bring_its_own_head() -> None:
    drafter = toy_dspark(toy_target(), draft_vocab_size=48, changed=table("lm_head.weight", 48, 32))
    block, caches = drafting(drafter)
    assert drafter.base_logits(drafter.hidden(block, caches)).shape == (2, NUM_DRAFTS, 48)
