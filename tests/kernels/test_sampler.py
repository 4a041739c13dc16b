"""The plain sampler against the engine's rules for one row, and its verdicts against exact distributions.

Seen red: ties with the k-th left out; top-p before top-k; min_p of the total; noise of the anchor's place; drafts
judged past their length; a residual that is not cut; nothing left over, and token 0 for it; draws of all slots alike.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.proposer import candidate_probs
from outrider.engine.sampling import filtered_probs, gumbel_noise
from outrider.kernels.sampler import Drafted, RowFilters, Sampling, TorchSampler
from tests.kernels.sampled_rows import PARAMS, rough_logits, sampling
from tests.statistics import assert_chi_square, assert_frequencies

SAMPLER = TorchSampler()
SAMPLED = SamplingParams(temperature=1.0)
NUM_REQUESTS = 2500
WIDE = torch.float64


def probs_of(logits: Tensor, asked: Sampling, filters: RowFilters) -> Tensor:
    weights = ((logits - filters.largest[:, None]) / asked.temperatures[:, None]).exp() / filters.totals[:, None]
    return torch.where(logits >= filters.thresholds[:, None], weights, 0.0)


@pytest.mark.parametrize("size", [3, 41, 300])
def test_filters_leave_what_the_engines_do(size: int) -> None:
    for params in PARAMS[1:]:
        logits = rough_logits(7, size, WIDE)
        asked = sampling([params] * 7)
        found = probs_of(logits, asked, SAMPLER.filters(logits, asked))
        expected = torch.stack([filtered_probs(row, params) for row in logits])
        assert torch.equal(found > 0, expected > 0), params
        torch.testing.assert_close(found, expected, msg=str(params))


def test_greedy_rows_are_not_filtered() -> None:
    filters = SAMPLER.filters(rough_logits(6, 9, WIDE), sampling([SamplingParams(top_k=2, top_p=0.1, min_p=0.9)] * 6))
    assert filters.thresholds.tolist() == [-torch.inf] * 6
    assert filters.totals.tolist() == [0.0] * 6


def test_choices_are_the_best_or_by_the_noise_of_seed_and_place() -> None:
    logits, positions = rough_logits(len(PARAMS), 90, WIDE), torch.arange(len(PARAMS)) * 11
    asked = sampling(PARAMS)
    found = SAMPLER.choose(logits, asked, SAMPLER.filters(logits, asked), positions)
    for row, params in enumerate(PARAMS):
        if params.is_greedy:
            expected = logits[row].argmax()
        elif params.seed is None:
            expected = torch.tensor(0)
        else:
            noise = gumbel_noise(params.seed, int(positions[row]), 90)
            expected = (filtered_probs(logits[row], params).log() + noise).argmax()
        assert found[row] == expected, params


def test_rows_of_requests_and_spare_ones() -> None:
    asked = sampling([SAMPLED, replace(SAMPLED, temperature=0.5, top_k=3)])
    rows = asked.of(torch.tensor([1, 0, 0]), torch.tensor([True, True, False]))
    assert rows.temperatures.tolist() == [0.5, 1.0, 0.0]
    assert rows.top_ks.tolist() == [3, 0, 0]


def verdicts(target: Tensor, draft_probs: Tensor, params: SamplingParams, length: int) -> tuple[Tensor, Tensor]:
    """NUM_REQUESTS cycles of two drafts by a target [V] and draws from draft_probs [C]: tokens [Q, 3], counts [Q]."""
    asked = sampling([params] * NUM_REQUESTS)
    positions, candidates = torch.zeros(NUM_REQUESTS, dtype=torch.int64), torch.arange(len(draft_probs))
    candidates = candidates.expand(NUM_REQUESTS, -1)
    draws = [SAMPLER.draw(candidates, draft_probs.log().expand_as(candidates), asked, positions, k) for k in (0, 1)]
    drafts, probs = (torch.stack(parts, dim=1) for parts in zip(*draws, strict=True))
    logits = target.log().expand(3 * NUM_REQUESTS, -1)
    row_index = torch.arange(3 * NUM_REQUESTS).view(NUM_REQUESTS, 3)
    filters = SAMPLER.filters(logits, sampling([params] * 3 * NUM_REQUESTS))
    shape, lengths = (NUM_REQUESTS, 2, len(draft_probs)), torch.full_like(positions, length)
    chances = probs.gather(2, drafts[..., None]).squeeze(2)
    block = Drafted(drafts, candidates[:, None].expand(shape), probs, chances, lengths, positions, row_index)
    counts, added = SAMPLER.reject(logits, asked, filters, block)
    slots = torch.arange(3)
    tokens = torch.cat([drafts, added[:, None]], dim=1)
    tokens = torch.where(slots == counts[:, None], added[:, None], tokens)
    return torch.where(slots <= counts[:, None], tokens, -1), counts


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.75}])
@pytest.mark.parametrize("draft", [(0.5, 0.2, 0.3), (0.0, 1.0), (0.1, 0.4, 0.2, 0.3)], ids=["thin", "point", "same"])
def test_every_token_is_the_targets(filters: dict[str, float], draft: tuple[float, ...]) -> None:
    target, params = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=WIDE), replace(SAMPLED, **filters)
    exact = filtered_probs(target.log(), params)
    for length in (2, 1):
        tokens, counts = verdicts(target, torch.tensor(draft, dtype=WIDE), params, length)
        assert counts.max() == length
        for slot in range(length + 1):
            reached = tokens[:, slot][tokens[:, slot] >= 0]
            assert_frequencies(reached.tolist(), exact.tolist())


def test_where_nothing_is_left_the_target_is_sampled() -> None:
    target = torch.tensor([0.0, 0.3, 0.5, 0.2], dtype=WIDE)
    logits, row_index = target.log().expand(2 * NUM_REQUESTS, -1), torch.arange(2 * NUM_REQUESTS).view(-1, 2)
    ids = torch.arange(4).expand(NUM_REQUESTS, 1, -1)
    full, zeros = torch.ones(NUM_REQUESTS, 1, 4, dtype=WIDE), torch.zeros(NUM_REQUESTS, dtype=torch.int64)
    block = Drafted(zeros[:, None], ids, full, full[..., 0], zeros + 1, zeros, row_index)
    filters = SAMPLER.filters(logits, sampling([SAMPLED] * 2 * NUM_REQUESTS))
    counts, added = SAMPLER.reject(logits, sampling([SAMPLED] * NUM_REQUESTS), filters, block)
    assert not counts.any()
    assert_frequencies(added.tolist(), target.tolist())


def test_drafts_are_drawn_from_the_filtered_candidates() -> None:
    num, size = len(PARAMS), 30
    ids = torch.stack([torch.randperm(200, generator=torch.Generator().manual_seed(row))[:size] for row in range(num)])
    logits, positions = rough_logits(num, size, WIDE).sort(descending=True).values, torch.arange(num) * 4
    for slot in (0, 3):
        drafts, probs = SAMPLER.draw(ids, logits, sampling(PARAMS), positions, slot)
        for row, params in enumerate(PARAMS):
            expected = candidate_probs(logits[row], params)
            torch.testing.assert_close(probs[row], expected)
            if params.seed is not None:
                noise = gumbel_noise(params.seed, int(positions[row]) + 1 + slot, 200)[ids[row]]
                assert drafts[row] == ids[row, (expected.log() + noise).argmax()]
            elif params.is_greedy:
                assert drafts[row] == ids[row, 0]


def test_draws_without_a_seed_are_independent_from_slot_to_slot() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=WIDE)
    asked, ids = sampling([SAMPLED] * NUM_REQUESTS), torch.arange(3).expand(NUM_REQUESTS, -1)
    positions = torch.arange(NUM_REQUESTS) // 2
    slots = [SAMPLER.draw(ids, probs.log().expand_as(ids), asked, positions, slot)[0] for slot in (0, 1)]
    pairs = torch.stack(slots, dim=1).tolist()
    assert_chi_square(map(tuple, pairs), {(a, b): float(probs[a] * probs[b]) for a in range(3) for b in range(3)})
