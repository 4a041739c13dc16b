"""T-024: exactly one start token however a text comes in, added by `Tokenizer.encode` alone; ids are taken as they are.

Chat has no path yet. Seen red: encode adding a second start token; LLM.encode adding one to ids; the trainer encoding
without.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.backends.local import LLM, make_engine
from outrider.benchmarking.demo import run_prompt
from outrider.core import SamplingParams
from outrider.engine.engine import EngineConfig
from outrider.kernels.reference import TorchKernels
from outrider.tokenizer import Tokenizer
from outrider.training.generate import encode_openings
from outrider.training.openings import Opening
from tests.training import tiny

TEXT = "a cat"
START = tiny.BOS_ID
PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.tokenizer(), bos_id=START, eos_ids=(tiny.EOS_ID,))


@pytest.fixture
def llm(tokenizer: Tokenizer) -> LLM:
    target = tiny.target(kernels=TorchKernels(torch.float32))
    return LLM(make_engine(target, None, tokenizer, EngineConfig(context_length=64)), tokenizer)


@pytest.fixture
def fed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Prompts as the engine gets them."""
    prompts: list[list[int]] = []
    add = llm.engine.add

    def watched(prompt: Any, params: SamplingParams) -> Any:
        prompts.append(list(prompt))
        return add(prompt, params)

    monkeypatch.setattr(llm.engine, "add", watched)
    return prompts


def test_t024_text_gets_one(llm: LLM, fed: list[list[int]]) -> None:
    generations = llm.generate([TEXT, f"<bos>{TEXT}"], PARAMS)
    list(llm.stream(TEXT, PARAMS))
    list(llm.stream(f"<bos>{TEXT}", PARAMS))
    assert fed == [[START, *llm.tokenizer.encode(TEXT, add_bos=False)]] * 4
    assert [generation.num_prompt_tokens for generation in generations] == [len(fed[0])] * 2


@pytest.mark.parametrize("token_ids", [[40, 41], [START, 40, 41], [START, START, 40]], ids=str)
def test_t024_ids_are_untouched(llm: LLM, fed: list[list[int]], token_ids: list[int]) -> None:
    (generation,) = llm.generate([token_ids], PARAMS)
    assert fed == [token_ids]
    assert generation.num_prompt_tokens == len(token_ids)


def test_t024_trainer_and_benchmark_feed_what_generate_feeds(llm: LLM, fed: list[list[int]]) -> None:
    for text in (TEXT, f"<bos>{TEXT}"):
        row = run_prompt(llm, "plain", 0, text, PARAMS, lambda *_: None)
        opening = Opening(category="prose", kind="story", text=text)
        trained, lengths = encode_openings([opening], llm.tokenizer, max_tokens=16, device=torch.device("cpu"))
        assert trained[0, : lengths[0]].tolist() == fed[-1] == [START, *llm.tokenizer.encode(TEXT, add_bos=False)]
        assert row.num_prompt_tokens == len(fed[-1])
