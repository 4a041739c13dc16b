"""Greedy equality on CUDA in bf16: constant shapes make it exact, bit for bit.

$OUTRIDER_TEST_TARGET names the embedded default's file or prepared directory where its package is not installed.
"""

from __future__ import annotations

import functools
import os

import pytest

import outrider
from outrider.benchmarking.workloads import TEST
from outrider.weights.locate import embedded_drafter

GREEDY = {"max_tokens": 96, "ignore_eos": True}
SEEDED = {"max_tokens": 48, "ignore_eos": True, "temperature": 1.0, "top_p": 0.95, "seed": 7}


@functools.cache
def cuda_llm() -> outrider.LLM:
    """Gemma 3 270M with its shipped drafter."""
    return outrider.load(
        os.environ.get("OUTRIDER_TEST_TARGET"),
        drafter=str(embedded_drafter()),
        device="cuda",
        config=outrider.EngineConfig(context_length=1024),
    )


@functools.cache
def plain_token_ids(**settings: float) -> list[tuple[int, ...]]:
    """What an engine without a drafter writes."""
    results = cuda_llm().without_drafter().generate(list(TEST.prompts), outrider.SamplingParams(**settings))  # type: ignore[arg-type]
    return [result.token_ids for result in results]


@pytest.mark.gpu
@pytest.mark.parametrize("draft_length", [1, 3, 7])
@pytest.mark.parametrize("settings", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_text_is_the_same_with_and_without_drafting(settings: dict[str, float], draft_length: int) -> None:
    params = outrider.SamplingParams(num_speculative_tokens=draft_length, **settings)  # type: ignore[arg-type]
    drafted = cuda_llm().generate(list(TEST.prompts), params)
    assert [result.token_ids for result in drafted] == plain_token_ids(**settings)
    assert sum(result.acceptance.num_accepted_tokens for result in drafted) > 0
