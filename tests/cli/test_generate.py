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
from tests.embedded import embedded_llm, plain_llm

FIXTURE = json.loads((Path(__file__).parents[1] / "golden" / "generate.json").read_text(encoding="utf-8"))


def test_fixture_belongs_to_the_prompts() -> None:
    assert FIXTURE["workload_sha256"] == GOLDEN.sha256
    assert [case["prompt"] for case in FIXTURE["cases"]] == list(GOLDEN.prompts)


@pytest.mark.parametrize("is_drafting", [False, True])
def test_greedy_text_equals_transformers(is_drafting: bool) -> None:
    llm = embedded_llm() if is_drafting else plain_llm()
    results = llm.generate([case["prompt"] for case in FIXTURE["cases"]], SamplingParams(max_tokens=64))
    assert [list(result.token_ids) for result in results] == [case["token_ids"] for case in FIXTURE["cases"]]
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
