"""Noise and filters: the distribution a request asks for, and random numbers that depend on nothing but their key.

Noise is Philox4x32-10 (Salmon et al. 2011), keyed by (request seed, position, slot, purpose): it does not matter what
else ran, in which order or in which batch. Filters work on one row at a time, always on the same shape, so that a
row's probabilities never depend on how many rows were sampled with it (design §4.2).
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from outrider.core import SamplingParams

LOW_32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10


class NoisePurpose(IntEnum):
    """Each use of noise has its own stream, so that no number serves twice."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2  # residual, bonus and first token: one of them a cycle
    MATCH = 3  # shared by drafter and target


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Four 32-bit words, as int64 tensors, for each 64-bit seed and 128-bit counter (all int64, broadcastable)."""
    key_0, key_1 = seed & LOW_32, (seed >> 32) & LOW_32
    c_0, c_1, c_2, c_3 = (word & LOW_32 for word in counter)
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap modulo 2^64, which leaves both halves of the unsigned product intact.
        product_0, product_1 = c_0 * PHILOX_MULTIPLIERS[0], c_2 * PHILOX_MULTIPLIERS[1]
        high_0, high_1 = (product_0 >> 32) & LOW_32, (product_1 >> 32) & LOW_32
        c_0, c_1, c_2, c_3 = high_1 ^ c_1 ^ key_0, product_1 & LOW_32, high_0 ^ c_3 ^ key_1, product_0 & LOW_32
        key_0, key_1 = (key_0 + PHILOX_KEY_STEPS[0]) & LOW_32, (key_1 + PHILOX_KEY_STEPS[1]) & LOW_32
    return [c_0, c_1, c_2, c_3]


def uniforms(seeds: Tensor, positions: Tensor, slots: Tensor, purpose: NoisePurpose) -> Tensor:
    """One float64 in (0, 1) for each (seed, position, slot), int64 tensors of one shape."""
    words = philox(seeds, (slots, positions, torch.full_like(slots, int(purpose)), torch.zeros_like(slots)))
    return (words[0].to(torch.float64) + 0.5) * 2.0**-32


def gumbel_noise(seed: int, position: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Gumbel noise for `count` token ids at an absolute position, float64 [count], the same for drafter and target."""
    blocks = torch.arange((count + 3) // 4, device=device)
    fixed = [torch.full_like(blocks, value) for value in (position, int(NoisePurpose.MATCH))]
    words = philox(torch.full_like(blocks, seed), (blocks, fixed[0], fixed[1], torch.zeros_like(blocks)))
    uniform = (torch.stack(words, dim=-1).view(-1)[:count].to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


def top_p_threshold(probs: Tensor, top_p: float) -> Tensor:
    """Largest t such that the probs >= t of a row [V] sum to top_p or more; found by bisection on the bits of t.

    Non-negative floats order as their bit patterns do, so the answer is exact and takes no sort.
    """
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
    if 0 < params.top_k < scaled.shape[0]:
        kth = scaled.topk(params.top_k, sorted=True).values[-1]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
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
