"""Synthetic acceptance: how many drafts a cycle keeps is drawn, whatever the target says. For timing, never for text.

The settings mean what vLLM's do (formats.md §4): `rates` are unconditional, rate i the share of cycles that keep draft
i; a length becomes the schedule of least variance, ones, then one fraction. Draft i is kept, given those before it,
with chance rate_i / rate_(i-1); one uniform number a cycle does that, since the rates never rise: the count is how many
rates lie above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from outrider.errors import ConfigError
from outrider.kernels.noise import NoisePurpose, philox


def check_synthetic(length: float | None, rates: Sequence[float] | None) -> None:
    """ConfigError for settings that cannot be, whatever the draft length."""
    if length is not None and rates is not None:
        raise ConfigError("synthetic_acceptance_length and synthetic_acceptance_rates exclude each other. Give one.")
    if length is not None and not (_is_number(length) and length >= 1):
        raise ConfigError(f"synthetic_acceptance_length={length!r} is not a number of at least 1.")
    if rates is None:
        return
    if not isinstance(rates, tuple) or not rates or not all(_is_number(rate) and 0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"synthetic_acceptance_rates={rates!r} is not a tuple of numbers from 0 to 1.")
    if any(later > earlier for earlier, later in pairwise(rates)):
        raise ConfigError(
            f"synthetic_acceptance_rates={rates!r} rises, but rate i is the share of all cycles that keep draft i. "
            "Give unconditional rates."
        )


def synthetic_rates(
    length: float | None, rates: Sequence[float] | None, *, draft_length: int
) -> tuple[float, ...] | None:
    """Share of cycles that keep each of `draft_length` drafts; None where neither setting is given.

    ConfigError where they do not fit the draft length.
    """
    if rates is not None:
        if len(rates) != draft_length:
            raise ConfigError(
                f"synthetic_acceptance_rates has {len(rates)} entries, but {draft_length} tokens are drafted. Give as "
                "many, or set num_speculative_tokens."
            )
        return tuple(rates)
    if length is None:
        return None
    if length > draft_length + 1:
        raise ConfigError(
            f"synthetic_acceptance_length={length!r} is more than the {draft_length + 1} tokens that a cycle is worth "
            f"with {draft_length} drafts. Lower it."
        )
    return tuple(min(1.0, max(0.0, length - 1 - slot)) for slot in range(draft_length))


def kept_counts(rates: Sequence[float], *, seed: int, first_position: int, num_positions: int) -> list[int]:
    """Drafts to keep in a cycle whose anchor is at each of so many positions: noise depends on seed and position."""
    positions = torch.arange(first_position, first_position + num_positions)
    words = philox(seed, (0, positions, int(NoisePurpose.SYNTHETIC), 0))[0]
    uniforms = (words.to(torch.float64) + 0.5) * 2.0**-32
    counts: list[int] = (uniforms[:, None] < torch.tensor(rates, dtype=torch.float64)).sum(dim=1).tolist()
    return counts


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
