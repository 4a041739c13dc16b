"""The text equals transformers' own on the same dequantised weights (fixture: tools/golden_generate.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.benchmarking.workloads import GOLDEN
from outrider.cli.main import app
from outrider.core import SamplingParams
from outrider.errors import RequestError
from tests.embedded import embedded_llm, plain_llm

FIXTURE = json.loads((Path(__file__).parents[1] / "golden" / "generate.json").read_text(encoding="utf-8"))
NUM_TOKENS = 32  # of the 64 in the fixture


def test_fixture_belongs_to_the_prompts() -> None:
    assert FIXTURE["workload_sha256"] == GOLDEN.sha256
    assert [case["prompt"] for case in FIXTURE["cases"]] == list(GOLDEN.prompts)


@pytest.mark.parametrize("is_drafting", [False, True])
def test_greedy_text_equals_transformers(is_drafting: bool) -> None:
    llm = embedded_llm() if is_drafting else plain_llm()
    results = llm.generate([case["prompt"] for case in FIXTURE["cases"]], SamplingParams(max_tokens=NUM_TOKENS))
    expected = [case["token_ids"][:NUM_TOKENS] for case in FIXTURE["cases"]]
    assert [list(result.token_ids) for result in results] == expected
    if is_drafting:
        assert sum(result.acceptance.num_accepted_tokens for result in results) > 0


def test_command_prints_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = embedded_llm()  # before load is replaced
    monkeypatch.setattr("outrider.load", lambda *_, **__: llm, raising=False)
    case: dict[str, Any] = FIXTURE["cases"][0]
    shown = CliRunner().invoke(app, ["generate", case["prompt"], "--max-tokens", "16", "--json"])
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result["token_ids"] == case["token_ids"][:16]
    assert result["finish_reason"] == "length"


def test_command_streams_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = embedded_llm()  # before load is replaced
    monkeypatch.setattr("outrider.load", lambda *_, **__: llm, raising=False)
    case = FIXTURE["cases"][0]
    shown = CliRunner().invoke(app, ["generate", case["prompt"], "--max-tokens", "16"])
    expected = plain_llm().generate([case["prompt"]], SamplingParams(max_tokens=16))[0].text
    assert shown.stdout == expected + "\n"


def test_command_takes_penalties_bias_and_bans(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []

    class Recorder:
        def stream(self, prompt: str, params: SamplingParams) -> list[Any]:
            seen.append(params)
            return []

    monkeypatch.setattr("outrider.load", lambda *_, **__: Recorder(), raising=False)
    options = "--min-tokens 3 --presence-penalty 0.5 --frequency-penalty -0.25 --repetition-penalty 1.2"
    lists = "--logit-bias 506=-100 --logit-bias 7=2.5 --bad-word the --bad-word of"
    shown = CliRunner().invoke(app, ["generate", "a", *options.split(), *lists.split()])
    assert shown.exit_code == 0, shown.output
    assert seen == [
        SamplingParams(
            max_tokens=128,
            min_tokens=3,
            presence_penalty=0.5,
            frequency_penalty=-0.25,
            repetition_penalty=1.2,
            logit_bias={506: -100.0, 7: 2.5},
            bad_words=("the", "of"),
        )
    ]


def test_command_takes_synthetic_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def refuse(*_: object, config: Any, **__: object) -> None:
        seen.append(config)
        raise RequestError("seen")

    monkeypatch.setattr("outrider.load", refuse, raising=False)
    for options in ("--synthetic-acceptance-length 5.5", "--synthetic-acceptance-rates 0.9,0.5 -n 2"):
        CliRunner().invoke(app, ["generate", "a", *options.split()])
    assert (seen[0].synthetic_acceptance_length, seen[0].synthetic_acceptance_rates) == (5.5, None)
    assert (seen[1].synthetic_acceptance_rates, seen[1].num_speculative_tokens) == ((0.9, 0.5), 2)


@pytest.mark.parametrize("text", ["506", "a=1", "5=x", "=", "5=1000"])
def test_a_bias_that_cannot_be_read_is_refused(text: str) -> None:
    shown = CliRunner().invoke(app, ["generate", "a", "--logit-bias", text])
    assert shown.exit_code != 0
    assert isinstance(shown.exception, (RequestError, SystemExit))


def test_penalised_text_is_the_same_with_and_without_the_drafter() -> None:
    params = SamplingParams(
        max_tokens=24, frequency_penalty=0.3, repetition_penalty=1.1, bad_words=("the",), min_tokens=24, logprobs=2
    )
    prompts = [FIXTURE["cases"][0]["prompt"]]
    (plain,), (drafted,) = plain_llm().generate(prompts, params), embedded_llm().generate(prompts, params)
    assert plain.token_ids == drafted.token_ids
    assert plain.logprobs == drafted.logprobs
    assert len(plain.logprobs) == len(plain.token_ids) == 24
    assert "the" not in plain.text.split()
    assert drafted.acceptance.num_accepted_tokens > 0
