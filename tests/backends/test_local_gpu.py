"""Greedy equality on CUDA in bf16: constant shapes make it exact, bit for bit."""

from __future__ import annotations

import pytest

import outrider
from outrider.benchmarking.workloads import TEST

NUM_TOKENS = 96


@pytest.mark.gpu
@pytest.mark.parametrize("draft_length", [1, 3, 7])
def test_greedy_text_is_the_same_with_and_without_drafting(draft_length: int) -> None:
    llm = outrider.load(device="cuda", config=outrider.EngineConfig(context_length=1024))
    params = outrider.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, num_speculative_tokens=draft_length)
    drafted = llm.generate(list(TEST.prompts), params)
    plain = llm.without_drafter().generate(
        list(TEST.prompts), outrider.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    )
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.acceptance.num_accepted_tokens for result in drafted) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("draft_length", [3, 7])
def test_seeded_text_is_the_same_with_and_without_drafting(draft_length: int) -> None:
    llm = outrider.load(device="cuda", config=outrider.EngineConfig(context_length=1024))
    sampled = {"max_tokens": 48, "ignore_eos": True, "temperature": 1.0, "top_p": 0.95, "seed": 7}
    drafted = llm.generate(list(TEST.prompts), outrider.SamplingParams(num_speculative_tokens=draft_length, **sampled))
    plain = llm.without_drafter().generate(list(TEST.prompts), outrider.SamplingParams(**sampled))
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
