"""Random numbers that depend on nothing but their key: not on what else ran, in which order or in which batch.

Philox4x32-10 (Salmon et al. 2011), keyed by (request seed, position, slot, purpose).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10

Word = Any  # an int, or an int64 tensor


class NoisePurpose(IntEnum):
    """Each use of noise has its own stream, so that no number serves twice."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2  # residual, bonus and first token: one of them a cycle
    MATCH = 3  # shared by drafter and target
    SYNTHETIC = 4


def philox(seed: Word, counter: tuple[Word, Word, Word, Word]) -> list[Word]:
    """Four 32-bit words for each 64-bit seed and 128-bit counter; ints, or int64 tensors that broadcast."""
    key_0, key_1 = seed & LOW_32, (seed >> 32) & LOW_32
    c_0, c_1, c_2, c_3 = (word & LOW_32 for word in counter)
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap modulo 2^64, which leaves both halves of the unsigned product intact.
        product_0, product_1 = c_0 * PHILOX_MULTIPLIERS[0], c_2 * PHILOX_MULTIPLIERS[1]
        high_0, high_1 = (product_0 >> 32) & LOW_32, (product_1 >> 32) & LOW_32
        c_0, c_1, c_2, c_3 = high_1 ^ c_1 ^ key_0, product_1 & LOW_32, high_0 ^ c_3 ^ key_1, product_0 & LOW_32
        key_0, key_1 = (key_0 + PHILOX_KEY_STEPS[0]) & LOW_32, (key_1 + PHILOX_KEY_STEPS[1]) & LOW_32
    return [c_0, c_1, c_2, c_3]


def uniform_of(words: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, of 32-bit words, int64."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def gumbel_of(words: Tensor) -> Tensor:
    """Gumbel noise, float64, of 32-bit words, int64."""
    return -torch.log(-torch.log(uniform_of(words)))


def gumbel_of_ids(seeds: Word, positions: Word, token_ids: Tensor, purpose: Word, slots: Word = 0) -> Tensor:
    """Gumbel noise of token ids int64 [...], float64 [...]; four ids share a block. Keys are ints or broadcast."""
    zeros = torch.zeros_like(token_ids)
    counter = (token_ids // 4, zeros + positions, zeros + purpose, zeros + slots)
    words = torch.stack(philox(zeros + seeds, counter), dim=-1)
    return gumbel_of(words.gather(-1, (token_ids % 4)[..., None]).squeeze(-1))
