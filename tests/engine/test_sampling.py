"""Noise is what its name says, filters are their definitions by sorting."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from outrider.core import SamplingParams
from outrider.engine.sampling import (
    TOP_P_CANDIDATES,
    draw,
    filtered_probs,
    gumbel_noise,
    gumbel_noise_of,
    ids_at_least,
    largest,
    sampling_numbers,
    sampling_of,
    top_p_threshold,
    uniforms,
)
from outrider.kernels.noise import NoisePurpose
from tests.statistics import assert_frequencies


def test_uniforms_are_uniform_and_differ_by_every_part_of_their_key() -> None:
    plain = uniforms(5, 9, 4000, NoisePurpose.ACCEPT)
    assert stats.kstest(plain.numpy(), "uniform").pvalue > 1e-4
    assert torch.equal(uniforms(5, 9, 2, NoisePurpose.ACCEPT, first_slot=7), plain[7:9])
    others = [
        uniforms(6, 9, 4000, NoisePurpose.ACCEPT),
        uniforms(5, 10, 4000, NoisePurpose.ACCEPT),
        uniforms(5, 9, 4000, NoisePurpose.TARGET),
        plain.roll(1),
    ]
    assert all(not (plain == other).any() for other in others)
    assert all(abs(torch.corrcoef(torch.stack([plain, other]))[0, 1]) < 0.08 for other in others)


def test_gumbel_noise_is_gumbel_and_a_shorter_vocabulary_sees_its_beginning() -> None:
    noise = gumbel_noise(7, 12, 4001)
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-4
    assert torch.equal(gumbel_noise(7, 12, 10), noise[:10])
    some = torch.tensor([4000, 0, 17, 18])
    assert torch.equal(gumbel_noise_of(7, 12, some), noise[some])
    assert not (gumbel_noise(8, 12, 10) == noise[:10]).any()
    assert not (gumbel_noise(7, 13, 10) == noise[:10]).any()


def threshold_by_sorting(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Walk down the sorted probabilities, equal ones together, until their sum reaches top_p."""
    for value in probs.unique().flip(0):
        if probs[probs >= value].to(torch.float64).sum() >= top_p:
            return value
    return probs.new_zeros(())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.5, 0.9, 0.999])
def test_top_p_threshold_is_what_sorting_finds(dtype: torch.dtype, top_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 17, 300, 3 * TOP_P_CANDIDATES):
        logits = (3 * torch.randn(size, generator=generator, dtype=dtype)).round(decimals=1)  # rounded: ties
        probs = logits.softmax(dim=-1)
        assert torch.equal(probs >= top_p_threshold(probs, top_p), probs >= threshold_by_sorting(probs, top_p))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 640, 6400])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_searching_by_blocks_finds_what_searching_everything_does(size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(size)
    row = torch.randn(size, generator=generator).round(decimals=1)  # rounded: ties
    count = min(count, size)
    found = largest(row, count)
    assert torch.equal(found, row.sort(descending=True).values[:count])
    assert ids_at_least(row, found[-1]).tolist() == (row >= found[-1]).nonzero().flatten().tolist()


@pytest.mark.parametrize("size", [65, 640])
def test_ids_of_values_that_cannot_be_compared_are_all_kept(size: int) -> None:
    row = torch.full((size,), torch.nan)
    assert ids_at_least(row, largest(row, 5)[-1]).tolist() == list(range(size))


def kept(logits: list[float], **params: float) -> list[int]:
    probs = filtered_probs(torch.tensor(logits), SamplingParams(**{"temperature": 1.0, **params}))  # type: ignore[arg-type]
    assert float(probs.sum()) == pytest.approx(1.0)
    return probs.nonzero().flatten().tolist()


def test_filters_keep_what_they_say() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert kept(logits) == [0, 1, 2, 3]
    assert kept(logits, top_k=2) == [0, 1]
    assert kept(logits, top_k=9) == [0, 1, 2, 3]
    assert kept(logits, top_p=0.79) == [0, 1]
    assert kept(logits, top_p=0.81) == [0, 1, 2]
    assert kept(logits, top_p=1e-9) == [0]
    assert kept(logits, min_p=0.29) == [0, 1, 2]
    assert kept(logits, min_p=1.0) == [0]


def test_filters_come_in_order_and_after_the_temperature() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert kept(logits, top_k=2, top_p=0.62) == [0]  # of what top-k left, 0 holds 0.625
    assert kept(logits, top_p=0.62) == [0, 1]
    assert kept(logits, temperature=0.5, top_p=0.65) == [0]  # squared and normalised, 0 holds 0.685
    assert kept(logits, temperature=2.0, min_p=0.5) == [0, 1, 2]


def test_ties_are_kept_together() -> None:
    assert kept([2.0, 1.0, 1.0, 0.0], top_k=2) == [0, 1, 2]
    assert kept([1.0, 1.0, 0.0], top_p=0.3) == [0, 1]
    assert kept([1.0, 1.0, 0.0], min_p=1.0) == [0, 1]


def test_probabilities_left_are_in_proportion() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    probs = filtered_probs(logits, SamplingParams(temperature=1.0, top_k=2))
    torch.testing.assert_close(probs, torch.tensor([0.625, 0.375, 0.0, 0.0], dtype=torch.float64))


def test_numbers_of_a_request_fit_into_tensors() -> None:
    params = SamplingParams(temperature=0.5, top_k=10**30, top_p=0.75, min_p=0.25, seed=-(2**63))
    whole, fractions = sampling_numbers(params, -(2**63))
    sampling = sampling_of(torch.tensor(whole)[:, None], torch.tensor(fractions, dtype=torch.float64)[:, None])
    assert (int(sampling.seeds), int(sampling.are_seeded)) == (-(2**63), 1)
    assert int(sampling.top_ks) > 2**30
    assert [float(each) for each in (sampling.temperatures, sampling.top_ps, sampling.min_ps)] == [0.5, 0.75, 0.25]
    (_, seed, is_seeded), (temperature, *_) = sampling_numbers(SamplingParams(temperature=1e-6), 7)
    assert (seed, is_seeded, temperature) == (7, 0, 0.0)


def test_draw_follows_the_probabilities_and_takes_no_impossible_token() -> None:
    uniform = uniforms(0, 1, 20_000, NoisePurpose.TARGET)
    weights = torch.tensor([0.0, 0.5, 0.0, 1.0, 0.5, 0.0])  # need not sum to 1
    assert_frequencies(draw(weights.expand(20_000, -1), uniform).tolist(), [0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    ends = torch.tensor([2.0**-33, 1.0 - 2.0**-33], dtype=torch.float64)
    assert draw(weights.expand(2, -1), ends).tolist() == [1, 4]
