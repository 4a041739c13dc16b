"""Sampling kernels joined to their twin; a row alone is the row in company, bit for bit.

Seen red: ways that forget the last bound; a tie with the k-th one too many; noise of a split's own ids; candidates left
in the row; candidates weighed otherwise than the rest; nothing left over, and no fallback.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core import SamplingParams
from outrider.kernels import sampling as kernels
from outrider.kernels.noise import NoisePurpose, gumbel_of_ids, philox, uniform_of
from outrider.kernels.sampler import Drafted, RowFilters, TorchSampler
from tests.kernels.sampled_rows import PARAMS, drafted, rough_logits, sampling
from tests.kernels.triton_mode import DEVICE, IS_NATIVE, ids

pytestmark = pytest.mark.filterwarnings("ignore")
OURS, TWIN = kernels.GpuSampler(), TorchSampler()
LARGE = 262_144
UNSEEDED = SamplingParams(temperature=1.2, top_k=30, top_p=0.95)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, a program costs about the same whatever its size: several splits without many programs."""
    if not IS_NATIVE:
        monkeypatch.setattr(kernels, "SPLIT", 256)
        monkeypatch.setattr(kernels, "TILE", 256)


def assert_joined(ours: RowFilters, exact: RowFilters) -> None:
    torch.testing.assert_close(ours.thresholds, exact.thresholds, rtol=1e-6, atol=0)
    assert torch.equal(ours.largest, exact.largest)
    torch.testing.assert_close(ours.totals, exact.totals, rtol=1e-5, atol=0)


def check_rows(size: int, params: list[SamplingParams]) -> None:
    """Thresholds, totals and choices of rows with settings each."""
    num_rows = len(params)
    logits, asked = rough_logits(num_rows, size).to(DEVICE), sampling(params, DEVICE)
    found, exact = OURS.filters(logits, asked), TWIN.filters(logits, asked)
    assert_joined(found, exact)
    positions = torch.arange(num_rows, device=DEVICE) * 5
    chosen = OURS.choose(logits, asked, found, positions)
    assert torch.equal(chosen, TWIN.choose(logits, asked, exact, positions))
    last = slice(num_rows - 1, num_rows)
    alone = OURS.filters(logits[last], type(asked)(*(each[last] for each in asked)))
    assert all(torch.equal(one, many[last]) for one, many in zip(alone, found, strict=True))
    one = OURS.choose(logits[last], type(asked)(*(each[last] for each in asked)), alone, positions[last])
    assert torch.equal(one, chosen[last])


def check_verdicts(size: int, num_requests: int, num_drafts: int, num_candidates: int) -> Tensor:
    """Unseeded requests and two others; returns how many drafts were kept."""
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=3)]
    params += [UNSEEDED, SamplingParams(temperature=2.5)] * num_requests
    params = params[:num_requests]
    num_rows = num_requests * (num_drafts + 1)
    logits = rough_logits(max(num_rows, 6), size)[:num_rows].to(DEVICE)
    block, asked = drafted(logits, num_requests, num_drafts, num_candidates), sampling(params, DEVICE)
    owners = torch.arange(num_rows, device=DEVICE) // (num_drafts + 1)
    filters = TWIN.filters(logits, asked.of(owners, owners >= 0))
    exact = TWIN.reject(logits, asked, filters, block)
    ours = OURS.reject(logits.clone(), asked, filters, block)
    for our, their in zip(ours, exact, strict=True):
        assert torch.equal(our[asked.are_rejected], their[asked.are_rejected])
    return exact[0][asked.are_rejected]


def check_draws(num_candidates: int) -> None:
    num = len(PARAMS)
    wide = rough_logits(num, 1024).to(DEVICE).topk(num_candidates + 2)
    token_ids, logits = wide.indices[:, 2:], wide.values[:, 2:]
    for slot in (0, 5):
        arguments = token_ids, logits, sampling(PARAMS, DEVICE), torch.arange(num, device=DEVICE), slot
        ours, exact = OURS.draw(*arguments), TWIN.draw(*arguments)
        assert torch.equal(ours[0], exact[0])
        torch.testing.assert_close(ours[1], exact[1], rtol=1e-5, atol=1e-7)


@triton.jit
def noise_kernel(seeds, positions, uniforms, gumbels, N: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, N)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    tl.store(uniforms + row * N + at, kernels._uniforms(seed, at, position, 1, 2, False))
    tl.store(gumbels + row * N + at, kernels._gumbel(seed, at * 7, position, 3, 0))


def test_noise_is_that_of_the_engine() -> None:
    seeds, positions, at = ids(0, -1, 2**63 - 1, -(2**63), 77), ids(0, 1, 5, 2**20, 131_071), ids(*range(16))
    uniforms, gumbels = torch.empty(2, 5, 16, dtype=torch.float64, device=DEVICE)
    noise_kernel[(5,)](seeds, positions, uniforms, gumbels, 16)
    counter = at, positions[:, None], int(NoisePurpose.ACCEPT), 2 + at * 0
    assert torch.equal(uniforms, uniform_of(philox(seeds[:, None], counter)[0]))
    expected = gumbel_of_ids(seeds[:, None], positions[:, None], (at * 7).expand(5, -1), NoisePurpose.MATCH)
    torch.testing.assert_close(gumbels, expected, rtol=1e-13, atol=1e-13)


def test_rows_are_filtered_and_chosen_from() -> None:
    check_rows(300, [PARAMS[index] for index in (2, 0, 1, 3, 10, 4)])


@pytest.mark.slow
def test_rows_of_every_setting() -> None:
    check_rows(1100, PARAMS)


@pytest.mark.parametrize(("num_drafts", "num_candidates"), [(3, 20), (4, 1), (0, 5)])
def test_drafts_are_judged(num_drafts: int, num_candidates: int) -> None:
    if num_drafts == 0:
        logits = rough_logits(8, 300).to(DEVICE)
        asked, filters = sampling([UNSEEDED] * 8, DEVICE), TWIN.filters(logits, sampling([UNSEEDED] * 8, DEVICE))
        rows, none = torch.arange(8, device=DEVICE), logits.new_zeros(8, 0)
        candidates = logits.new_zeros(8, 0, num_candidates)
        block = Drafted(none.long(), candidates.long(), candidates, none, rows * 0, rows, rows[:, None])
        exact = TWIN.reject(logits, asked, filters, block)
        ours = OURS.reject(logits, asked, filters, block)
        assert all(torch.equal(our, their) for our, their in zip(ours, exact, strict=True))
        return
    kept = check_verdicts(300, 12, num_drafts, num_candidates)
    assert len(kept.unique()) > 1


def test_where_nothing_is_left_the_target_is_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, 0.0]] * 12, device=DEVICE)
    rows, asked = torch.arange(12, device=DEVICE), sampling([SamplingParams(temperature=1.0)] * 6, DEVICE)
    candidates = ids(0, 1, 2, 3).expand(6, 1, -1)
    ones, zeros = torch.ones(6, 1, 4, device=DEVICE), rows[:6] * 0
    block = Drafted(zeros[:, None], candidates, ones, ones[..., 0], zeros + 1, rows[:6], rows.view(6, 2))
    filters = TWIN.filters(logits, sampling([SamplingParams(temperature=1.0)] * 12, DEVICE))
    exact = TWIN.reject(logits, asked, filters, block)
    ours = OURS.reject(logits.clone(), asked, filters, block)
    assert torch.equal(ours[0], exact[0])
    assert torch.equal(ours[1], exact[1])
    assert len(exact[1].unique()) > 1


def test_candidates_and_the_rest_are_weighed_alike() -> None:
    """Half of what is left is a candidate's, half is spread over all others."""
    num = 10
    logits = torch.zeros(2 * num, 300, device=DEVICE)
    logits[:, 1] = 5.7
    rows, asked = torch.arange(2 * num, device=DEVICE), sampling([SamplingParams(temperature=1.0)] * num, DEVICE)
    candidates, probs = ids(0, 1).expand(num, 1, -1), torch.tensor([1.0, 0.0], device=DEVICE).expand(num, 1, -1)
    zeros = rows[:num] * 0
    block = Drafted(zeros[:, None], candidates, probs, probs[..., 0], zeros + 1, rows[:num], rows.view(num, 2))
    filters = TWIN.filters(logits, sampling([SamplingParams(temperature=1.0)] * 2 * num, DEVICE))
    exact, ours = TWIN.reject(logits, asked, filters, block), OURS.reject(logits.clone(), asked, filters, block)
    assert all(torch.equal(our, their) for our, their in zip(ours, exact, strict=True))
    assert 0 < int((exact[1] == 1).sum()) < num
    assert 0 not in exact[1]


@pytest.mark.parametrize("num_candidates", [48, 1])
def test_drafts_are_drawn(num_candidates: int) -> None:
    check_draws(num_candidates)


def test_numbers_that_are_none_choose_some_token() -> None:
    logits = torch.full((2, 300), torch.nan, device=DEVICE)
    asked = sampling([SamplingParams(temperature=1.0, seed=1, top_k=3), SamplingParams()], DEVICE)
    filters = OURS.filters(logits, asked)
    assert not filters.largest.isfinite().any()
    chosen = OURS.choose(logits, asked, filters, ids(0, 0))
    assert bool(((chosen >= 0) & (chosen < 300)).all())


@pytest.mark.gpu
def test_rows_at_full_size() -> None:
    check_rows(LARGE, PARAMS)
    check_rows(LARGE, PARAMS * 6)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_drafts", "num_candidates"), [(7, 256), (15, 256), (7, 1)])
def test_verdicts_at_full_size(num_drafts: int, num_candidates: int) -> None:
    kept = check_verdicts(LARGE, 12, num_drafts, num_candidates)
    assert len(kept.unique()) > 1


@pytest.mark.gpu
def test_draws_at_full_size() -> None:
    check_draws(256)
