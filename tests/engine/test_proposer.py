"""The DFlash proposer on the toy drafter: what it draws from is what it hands on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.proposer import MAX_CANDIDATES, DFlashProposer, candidate_probs
from outrider.models.attention import allocate_caches
from tests.toy import CPU, TAP_LAYERS, toy_drafter, toy_target

SAMPLED = SamplingParams(temperature=1.0)


def make_proposer(draft_vocab_size: int | None = None) -> DFlashProposer:
    """Two seats with 6 tokens of context each, made of noise."""
    target = toy_target()
    drafter = toy_drafter(target, draft_vocab_size=draft_vocab_size)
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
