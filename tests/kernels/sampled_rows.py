"""Rows and drafts that the tests of samplers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.sampling import sampling_numbers, sampling_of
from outrider.kernels.sampler import Drafted, Sampling

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "seed": 3},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.6, "min_p": 0.05, "seed": 2**62},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 1.0, "top_p": 1e-9, "seed": -1},
    {"temperature": 2e-5, "top_p": 0.999999},
    {"temperature": 100.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10**9, "seed": 0},
]
PARAMS = [SamplingParams(**fields) for fields in SETTINGS]


def sampling(params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> Sampling:
    """One request each; those without a seed have their number for one."""
    numbers = [
        sampling_numbers(each, index + 50 if each.seed is None else each.seed) for index, each in enumerate(params)
    ]
    whole = torch.tensor([whole for whole, _ in numbers], device=device)
    fractions = torch.tensor([each for _, each in numbers], dtype=torch.float64, device=device)
    return sampling_of(whole.T.contiguous(), fractions.T.contiguous())


def rough_logits(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian and rounded, so that there are ties; one row is flat, and one has zeros of both signs."""
    generator = torch.Generator().manual_seed(size)
    logits = (3 * torch.randn(num_rows, size, generator=generator)).round(decimals=1).to(dtype)
    logits[3] = 0.25
    logits[5] = -logits[5].abs()
    logits[5, ::7], logits[5, 1::7] = 0.0, -0.0
    return logits


def drafted(logits: Tensor, num_requests: int, num_drafts: int, num_candidates: int, *, seed: int = 0) -> Drafted:
    """Request q has rows q * (K + 1) to its end; its drafts are among the likeliest, and drawn at random."""
    generator, device = torch.Generator().manual_seed(seed), logits.device
    row_index = torch.arange(num_requests * (num_drafts + 1), device=device).view(num_requests, num_drafts + 1)
    candidate_ids = logits[row_index[:, :-1]].topk(num_candidates).indices
    probs = (12 * torch.rand(candidate_ids.shape, generator=generator)).softmax(dim=-1)
    chosen = torch.randint(min(3, num_candidates), (num_requests, num_drafts, 1), generator=generator).to(device)
    probs = probs.to(device, logits.dtype)
    return Drafted(
        candidate_ids.gather(2, chosen).squeeze(2),
        candidate_ids,
        probs,
        probs.gather(2, chosen).squeeze(2),
        torch.arange(num_requests, device=device) % (num_drafts + 1),
        torch.arange(num_requests, device=device) * 3,
        row_index,
    )
