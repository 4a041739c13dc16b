"""Greedy equality on CUDA in bf16: constant shapes make it exact, bit for bit.

$OUTRIDER_TEST_TARGET names the embedded default's file or prepared directory where its package is not installed.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch

import outrider
from outrider.backends.dummy import build_dummy
from outrider.backends.exactness import check_exact
from outrider.benchmarking.workloads import TEST
from outrider.kernels.low_bit import LowBitMatrix
from outrider.kernels.ops import select_kernels
from outrider.weights.locate import embedded_drafter
from tests.embedded import unpacked_drafter

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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_drafter_changes_drafts_and_no_text(kind: str, tmp_path: Path) -> None:
    """A copy in plain numbers, which the kernels then read in few bits."""
    llm = outrider.load(
        os.environ.get("OUTRIDER_TEST_TARGET"),
        drafter=str(unpacked_drafter(tmp_path / "drafter")),
        drafter_quantization=kind,
        device="cuda",
        config=outrider.EngineConfig(context_length=1024),
    )
    drafted = llm.generate(list(TEST.prompts), outrider.SamplingParams(**GREEDY))  # type: ignore[arg-type]
    assert [result.token_ids for result in drafted] == plain_token_ids(**GREEDY)
    assert sum(result.acceptance.num_accepted_tokens for result in drafted) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_shared_head_is_copied_in_few_bits_and_drafts_in_a_graph(kind: str) -> None:
    cuda = torch.device("cuda")
    kernels = select_kernels("gpu", dtype=torch.bfloat16, device=cuda)
    models = build_dummy(
        "tiny", kernels=kernels, dtype=torch.bfloat16, device=cuda, context_length=256, drafter_quantization=kind
    )
    assert models.drafter is not None
    for matrix in (models.drafter.head, models.drafter.fc, models.drafter.layers[0].mlp.down_proj):
        assert isinstance(matrix, LowBitMatrix)
        assert matrix.is_int4 == (kind == "int4")
    assert isinstance(models.target.embedding, torch.Tensor)
    config = outrider.EngineConfig(context_length=256, max_seats=2, prefill_rows=64)
    prompts = [[2, *range(10, 30)], [2, *range(50, 60)]]
    assert check_exact(models, config, prompts, draft_length=7, num_tokens=48)
