"""Noise and filters: the distribution a request asks for, and random numbers that depend on nothing but their key.

Noise (`kernels/noise.py`) is keyed by (request seed, position, slot, purpose). Filters work on one row at a time,
always on the same shape, so that a row's probabilities never depend on how many rows were sampled with it (design
§4.2); `kernels/sampler.py` has them as functions of tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.kernels.noise import NoisePurpose, gumbel_of, gumbel_of_ids, philox, uniform_of
from outrider.kernels.sampler import Sampling

TOP_P_CANDIDATES = 1024  # likeliest ids among which top-p usually ends
MAX_TOP_K = 2**31  # more than any vocabulary has, and it fits into a tensor
BLOCK = 64  # a large row is searched by the maxima of its blocks

Device = torch.device | str


def sampling_numbers(
    params: SamplingParams, noise_seed: int
) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
    """(top_k, seed, is seeded) and (temperature, top_p, min_p) of one request, as `Sampling` has them."""
    temperature = 0.0 if params.is_greedy else params.temperature
    top_k = min(params.top_k, MAX_TOP_K)
    return (top_k, noise_seed, int(params.seed is not None)), (temperature, params.top_p, params.min_p)


def sampling_of(whole: Tensor, fractions: Tensor) -> Sampling:
    """`Sampling` of columns of `sampling_numbers`: int64 [3, Q] and float64 [3, Q]."""
    top_ks, seeds, are_seeded = whole.unbind(0)
    temperatures, top_ps, min_ps = fractions.unbind(0)
    return Sampling(temperatures, top_ks, top_ps, min_ps, seeds, are_seeded)


def uniforms(
    seed: int, position: int, num_slots: int, purpose: NoisePurpose, *, first_slot: int = 0, device: Device = "cpu"
) -> Tensor:
    """One number in (0, 1) for each slot from first_slot on, float64 [num_slots]; all parts of the key matter."""
    slots = range(first_slot, first_slot + num_slots)
    words = [philox(seed, (slot, position, int(purpose), 0))[0] for slot in slots]
    return uniform_of(torch.tensor(words, dtype=torch.int64, device=device))


def gumbel_noise(seed: int, position: int, count: int, device: Device = "cpu") -> Tensor:
    """Gumbel noise for `count` token ids at an absolute position, float64 [count], the same for drafter and target."""
    blocks = torch.arange((count + 3) // 4, device=device)
    words = philox(seed, (blocks, position, int(NoisePurpose.MATCH), 0))
    return gumbel_of(torch.stack(words, dim=-1).view(-1)[:count])


def gumbel_noise_of(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """`gumbel_noise` of some token ids, int64 [n], alone: float64 [n]."""
    return gumbel_of_ids(seed, position, token_ids, NoisePurpose.MATCH)


def largest(row: Tensor, count: int) -> Tensor:
    """The `count` largest values of a row [n], descending. The blocks with the largest maxima hold them all."""
    if len(row) % BLOCK or count * BLOCK >= len(row):
        return row.topk(count).values
    blocks = row.view(-1, BLOCK)
    return blocks.index_select(0, blocks.amax(dim=-1).topk(count).indices).view(-1).topk(count).values


def ids_at_least(row: Tensor, threshold: Tensor) -> Tensor:
    """Ascending indices of a row [n] whose values are not below the threshold, int64 [m]; all for a NaN threshold."""
    if len(row) % BLOCK:
        return (~(row < threshold)).nonzero().squeeze(-1)
    blocks = row.view(-1, BLOCK)
    hit = (~(blocks.amax(dim=-1) < threshold)).nonzero().squeeze(-1)
    block, column = (~(blocks.index_select(0, hit) < threshold)).nonzero(as_tuple=True)
    return hit[block] * BLOCK + column


def top_p_threshold(probs: Tensor, top_p: float) -> Tensor:
    """Largest t such that the probs >= t of a row [V] sum to top_p or more; 0 where rounding leaves less than top_p."""
    top = largest(probs, min(TOP_P_CANDIDATES, len(probs)))
    reached = top.to(torch.float64).cumsum(dim=0) >= top_p
    if bool(reached[-1]):
        return top[reached.int().argmax()]
    return _top_p_threshold_by_bisection(probs, top_p)


def _top_p_threshold_by_bisection(probs: Tensor, top_p: float) -> Tensor:
    """The same for a flat row: non-negative floats order as their bit patterns do, so this is exact without a sort."""
    bits_type = torch.int64 if probs.dtype == torch.float64 else torch.int32
    low = torch.zeros((), dtype=bits_type, device=probs.device)  # always reaches top_p
    high = probs.max().view(bits_type) + 1  # never does
    exact = probs.to(torch.float64)
    for _ in range(64 if bits_type == torch.int64 else 32):
        middle = low + (high - low) // 2
        reached = torch.where(probs >= middle.view(probs.dtype), exact, 0.0).sum() >= top_p
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return low.view(probs.dtype)


def filtered_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution a sampled request asks for, [V], from one row of logits [V]: temperature, top-k, top-p, min-p.

    One rule for target and drafter rows; a drafter row may cover only its own candidates.
    """
    scaled = logits / params.temperature
    if not 0 < params.top_k < len(scaled):
        return _filtered_by_chance(scaled, params)
    kept = ids_at_least(scaled, largest(scaled, params.top_k)[-1])  # ties with the k-th as well
    return torch.zeros_like(scaled).scatter_(0, kept, _filtered_by_chance(scaled[kept], params))


def _filtered_by_chance(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Softmax of scaled logits [n], then top-p and min-p."""
    probs = scaled.softmax(dim=-1)
    if params.top_p < 1.0:
        probs = probs.masked_fill(probs < top_p_threshold(probs, params.top_p), 0.0)
    if params.min_p > 0.0:
        probs = probs.masked_fill(probs < params.min_p * probs.max(), 0.0)
    return probs / probs.sum()


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sample: index int64 [...] from probs [..., V] (need not sum to 1) and uniform float64 [...]."""
    cumulative = probs.to(torch.float64).cumsum(dim=-1)
    wanted = uniform[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)
