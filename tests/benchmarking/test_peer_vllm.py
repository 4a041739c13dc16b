"""The script that times vLLM. Seen red: prefill left in, tokens of prefill counted as decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.benchmarking import peer_vllm
from outrider.benchmarking.peer_vllm import engine_options, parse, run_once, time_cell

ARGUMENTS = ["--out", "o", "--model", "m", "--prompt-tokens", "5", "--max-tokens", "11", "--runs", "1"]


class FakeLLM:
    """Answers at once; every answer of more than a token takes five cycles a request."""

    def __init__(self) -> None:
        self.num_drafts, self.prompts = 0, []

    def generate(self, prompts: list[Any], sampling: int, *, use_tqdm: bool) -> list[Any]:
        self.num_drafts += 0 if sampling == 1 else 5 * len(prompts)
        self.prompts.append(prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * sampling)]) for _ in prompts]

    def get_metrics(self) -> list[Any]:
        values = {"vllm:spec_decode_num_drafts": self.num_drafts, "vllm:spec_decode_num_accepted_tokens": 4.0}
        return [SimpleNamespace(name=name, value=value) for name, value in values.items()]


def asked(*more: str) -> Any:
    parsed = parse([*ARGUMENTS, *more])
    parsed.vocab_size = 512
    return parsed


def test_prefill_and_its_tokens_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 10.0, 14.0])
    monkeypatch.setattr(peer_vllm.time, "perf_counter", lambda: next(times))
    llm = FakeLLM()
    row = run_once(llm, lambda max_tokens: max_tokens, asked(), batch=2, prompt_tokens=5)
    assert (row["prefill_s"], row["decode_s"]) == (1.0, 3.0)
    assert (row["num_decoded_tokens"], row["num_cycles"]) == (20, 5.0)
    assert row["acceptance_length"] == 1.0
    first, second = llm.prompts
    assert first == second
    ids = [prompt["prompt_token_ids"] for prompt in first]
    assert ids[0] != ids[1]
    assert all(len(each) == 5 and max(each) < 512 for each in ids)


def test_figures_are_medians_of_what_counts() -> None:
    llm = FakeLLM()
    found = time_cell(llm, lambda max_tokens: max_tokens, asked(), batch=2, prompt_tokens=5)
    assert (found["batch"], found["prompt_tokens"]) == (2, 5)
    assert len(found["rows"]) == 1
    assert len(llm.prompts) == 2 * (peer_vllm.NUM_WARMUPS + 1)
    assert found["tokens_per_s"] == found["rows"][0]["num_decoded_tokens"] / found["rows"][0]["decode_s"]


def test_acceptance_is_imposed_where_something_is_drafted() -> None:
    assert "speculative_config" not in engine_options(asked())
    options = engine_options(
        asked("--num-speculative-tokens", "7", "--drafter", "d", "--acceptance-length", "5.23", "--batches", "1", "16")
    )
    assert options["max_num_seqs"] == 16
    assert options["speculative_config"] == {
        "method": "dflash",
        "model": "d",
        "num_speculative_tokens": 7,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 5.23,
    }
