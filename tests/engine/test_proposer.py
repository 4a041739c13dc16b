"""The DFlash proposer on the toy drafter: what it draws from is what it hands on.

Seen red: draws of every slot by the noise of the first.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.proposer import MAX_CANDIDATES, DFlashProposer, candidate_probs
from outrider.engine.sampling import sampling_numbers, sampling_of
from outrider.models.attention import allocate_caches
from outrider.models.drafter_config import BlockLayout, MarkovKind
from tests.cases.common import toy_proposer
from tests.scripted import make_test_engine, run_requests
from tests.toy import CPU, TAP_LAYERS, toy_drafter, toy_dspark, toy_target

SAMPLED = SamplingParams(temperature=1.0)


def make_proposer(draft_vocab_size: int | None = None, kind: MarkovKind | None = None) -> DFlashProposer:
    """Two seats with 6 tokens of context each, made of noise; with a `kind` it is a DSpark drafter."""
    target = toy_target()
    drafter = (
        toy_drafter(target, draft_vocab_size=draft_vocab_size)
        if kind is None
        else toy_dspark(target, kind=kind, draft_vocab_size=draft_vocab_size)
    )
    caches = allocate_caches(
        drafter.config.layers, num_seats=2, context_length=64, max_rows=16, dtype=torch.float64, device=CPU
    )
    proposer = DFlashProposer(drafter, caches)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(12, 32 * len(TAP_LAYERS), generator=generator, dtype=torch.float64)
    proposer.commit(taps, torch.arange(12) // 6, torch.arange(12) % 6)
    return proposer


def make_batch(*params: SamplingParams, noise_seed: int = 11) -> CycleBatch:
    count = len(params)
    return CycleBatch(
        seats=torch.arange(count),
        anchor_token_ids=torch.arange(count) + 20,
        anchor_positions=torch.full((count,), 6),
        draft_lengths=torch.full((count,), 4),
        host_positions=(6,) * count,
        host_lengths=(4,) * count,
        params=params,
        noise_seeds=tuple(noise_seed if each.seed is None else each.seed for each in params),
        adjustments=(None,) * count,
        outputs=((),) * count,
    )


def test_lengths_and_taps_come_from_the_drafter() -> None:
    proposer = make_proposer()
    assert (proposer.name, proposer.max_draft_length, proposer.default_draft_length) == ("toy-drafter", 4, 4)
    assert proposer.tap_layers == TAP_LAYERS


def test_greedy_drafts_are_point_masses_and_proposing_changes_nothing() -> None:
    proposer, batch = make_proposer(), make_batch(SamplingParams(), SamplingParams())
    first, second = proposer.propose(batch, 4), proposer.propose(batch, 4)
    assert first.token_ids.shape == (2, 4)
    assert torch.equal(first.candidate_ids[..., 0], first.token_ids)
    assert (first.candidate_probs == 1).all()
    assert torch.equal(first.token_ids, second.token_ids)


def test_a_greedy_request_drafts_the_same_beside_a_sampled_one() -> None:
    proposer = make_proposer()
    alone = proposer.propose(make_batch(SamplingParams()), 4)
    mixed = proposer.propose(make_batch(SamplingParams(), SAMPLED), 4)
    assert torch.equal(mixed.token_ids[0], alone.token_ids[0])
    assert torch.equal(mixed.candidate_probs[0, :, 0], torch.ones(4, dtype=torch.float64))
    assert (mixed.candidate_probs[0, :, 1:] == 0).all()


@pytest.mark.parametrize("draft_vocab_size", [None, 48])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_drafts_are_drawn_from_the_candidates_they_come_with(draft_vocab_size: int | None, filters: dict) -> None:
    proposer = make_proposer(draft_vocab_size)
    for noise_seed in range(5):
        draft = proposer.propose(make_batch(replace(SAMPLED, **filters), noise_seed=noise_seed), 4)
        chance = (draft.candidate_probs * (draft.candidate_ids == draft.token_ids[..., None])).sum(-1)
        assert (chance > 0).all()
        torch.testing.assert_close(draft.candidate_probs.sum(-1), torch.ones(1, 4, dtype=torch.float64))
        assert all(len(set(ids.tolist())) == draft.candidate_ids.shape[2] for ids in draft.candidate_ids[0])
        if draft_vocab_size is not None:
            assert (draft.candidate_ids % 2 == 0).all()  # the toy's reduced vocabulary holds even ids


def test_drafts_depend_on_the_noise_seed_alone() -> None:
    proposer = make_proposer()
    drafts = [proposer.propose(make_batch(SAMPLED, noise_seed=seed), 4).token_ids.tolist() for seed in (1, 1, 2)]
    assert drafts[0] == drafts[1] != drafts[2]


def test_seeded_drafts_depend_on_the_requests_seed_alone() -> None:
    proposer = make_proposer()
    first, second = (make_batch(replace(SAMPLED, seed=5), noise_seed=seed) for seed in (1, 2))
    assert torch.equal(proposer.propose(first, 4).token_ids, proposer.propose(second, 4).token_ids)
    other = proposer.propose(make_batch(replace(SAMPLED, seed=6)), 4)
    assert not torch.equal(proposer.propose(first, 4).token_ids, other.token_ids)


def test_one_candidate_leaves_no_choice() -> None:
    proposer = make_proposer()
    greedy = proposer.propose(make_batch(SamplingParams()), 4).token_ids
    for params in (replace(SAMPLED, top_k=1), replace(SAMPLED, top_k=1, seed=5)):
        assert torch.equal(proposer.propose(make_batch(params), 4).token_ids, greedy)


def test_candidates_of_a_greedy_request_are_its_first() -> None:
    assert candidate_probs(torch.tensor([3.0, 2.0, 1.0]), SamplingParams()).tolist() == [1.0, 0.0, 0.0]
    assert candidate_probs(torch.tensor([3.0, 2.0, 1.0]), replace(SAMPLED, top_k=1)).tolist() == [1.0, 0.0, 0.0]


def test_candidates_are_bounded() -> None:
    proposer = make_proposer()
    draft = proposer.propose(make_batch(SAMPLED), 2)
    assert draft.candidate_ids.shape == (1, 2, min(MAX_CANDIDATES, 96))


@pytest.mark.parametrize("draft_vocab_size", [None, 48])
@pytest.mark.parametrize("kind", list(MarkovKind))
def test_a_markov_head_sees_the_tokens_drafted_before(kind: MarkovKind, draft_vocab_size: int | None) -> None:
    """Every draft is the best, or a draw, of the logits that belong to the drafts before it."""
    proposer = make_proposer(draft_vocab_size, kind)
    batch, drafter = make_batch(SamplingParams(), SAMPLED), proposer.drafter
    alone, mixed = proposer.propose(make_batch(SamplingParams()), 4), proposer.propose(batch, 4)
    assert torch.equal(alone.token_ids[0], mixed.token_ids[0])
    previous = torch.cat([batch.anchor_token_ids[:, None], mixed.token_ids[:, :-1]], dim=1)
    block = drafter.block(batch.anchor_token_ids, batch.seats, batch.anchor_positions, num_drafts=4)
    logits, chances = drafter.draft_logits(block, proposer.caches, previous)
    table = torch.arange(96) if drafter.draft_to_target is None else drafter.draft_to_target
    assert torch.equal(mixed.token_ids[0], table[logits[0].argmax(dim=-1)])
    expected = torch.zeros(4, 96, dtype=torch.float64).index_copy(1, table, logits[1].softmax(dim=-1))
    found = torch.zeros(4, 96, dtype=torch.float64).scatter(1, mixed.candidate_ids[1], mixed.candidate_probs[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert mixed.confidences is not None
    torch.testing.assert_close(mixed.confidences, chances)
    torch.testing.assert_close(alone.confidences, chances[:1] if chances is not None else None)


@pytest.mark.parametrize("kind", [None, *MarkovKind])
def test_drafts_by_tensors_are_those_of_each_request(kind: MarkovKind | None) -> None:
    """Greedy and seeded drafts to the token, what others are drawn from, and their slots apart."""
    proposer = make_proposer(48, kind)
    for params in (
        (replace(SAMPLED, seed=7, top_k=9), SamplingParams()),
        (replace(SAMPLED, seed=-8, min_p=0.2), SAMPLED),
    ):
        batch = make_batch(*params)
        numbers = [sampling_numbers(*each) for each in zip(params, batch.noise_seeds, strict=True)]
        sampling = sampling_of(
            torch.tensor([whole for whole, _ in numbers]).T,
            torch.tensor([fractions for _, fractions in numbers], dtype=torch.float64).T,
        )
        expected, found = proposer.propose(batch, 4), proposer.propose_on_device(batch, 4, sampling)
        is_same = torch.tensor([each.is_greedy or each.seed is not None for each in params])
        assert torch.equal(found.token_ids[is_same], expected.token_ids[is_same])
        assert torch.equal(found.candidate_ids[is_same], expected.candidate_ids[is_same])
        torch.testing.assert_close(found.candidate_probs[is_same], expected.candidate_probs[is_same])
        torch.testing.assert_close(found.candidate_probs[:, 0], expected.candidate_probs[:, 0])
        assert found.candidate_ids.shape[2] == proposer.num_candidates
        chance = (found.candidate_probs * (found.candidate_ids == found.token_ids[..., None])).sum(-1)
        assert (chance > 0).all()


def test_a_drafter_without_heads_knows_no_confidence() -> None:
    assert make_proposer().propose(make_batch(SAMPLED), 2).confidences is None


@pytest.mark.parametrize("layout", list(BlockLayout))
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=3)])
def test_text_is_the_same_with_a_dspark_drafter(layout: BlockLayout, params: SamplingParams) -> None:
    target = toy_target()
    params = replace(params, max_tokens=24)
    drafter = toy_dspark(target, kind=MarkovKind.RNN, layout=layout)
    prompts = ([5, 17, 30, 2], [60, 7, 7])
    engine = make_test_engine(target, toy_proposer(drafter, num_seats=4))
    plain = run_requests(make_test_engine(target), *((prompt, params) for prompt in prompts))
    assert run_requests(engine, *((prompt, params) for prompt in prompts)) == plain
    assert engine.proposer is not None
    assert engine.proposer.max_draft_length == (4 if layout is BlockLayout.SAME_POSITION else 5)
