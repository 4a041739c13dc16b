"""The command over scripted servers and the embedded default. Seen red: a fault with exit code 0, claims in shares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.backends.scripted import Script
from outrider.benchmarking.request_sets import RequestSet, load_request_set
from outrider.benchmarking.workloads import DEMO
from outrider.cli.main import app
from outrider.errors import EngineFault, OutriderError
from tests.embedded import embedded_llm, plain_llm
from tests.serving import Served, serve

TOOLS = load_request_set("tools")
ANSWER = "Each colony has one queen, who lays all eggs that workers then raise."
QUICK = ["--prompts", "6", "--rounds", "2", "--max-tokens", "12"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "compare", *arguments], env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"": Script.of_text(ANSWER)}) as server:
        yield server


def two_arms(served: Served, field: str = "speculative.enabled=true") -> list[str]:
    return ["--arm", f"off={served.url},speculative.enabled=false", "--arm", f"on={served.url},{field}"]


def test_two_arms_of_one_server_with_a_record(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "results" / "compare.json"
    shown = run(*two_arms(served), "--aa", *QUICK, "--claim", "5", "--json", "--record", str(path))
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    summary: dict[str, Any] = found["summary"]
    assert (summary["arm"], summary["baseline"], summary["identical"]) == ("on", "off", True)
    low, high = summary["speedup_interval"]
    assert low <= summary["speedup"] <= high
    assert summary["claim"] == pytest.approx(0.05)
    assert summary["noise_floor"] > 0
    assert (summary["num_prompts"], summary["num_rounds"], summary["num_warmup_rounds"]) == (6, 2, 1)
    assert [arm["name"] for arm in found["arms"]] == ["off", "on", "off again"]
    record = json.loads(path.read_text())
    assert record["summary"] == summary
    assert len(record["rows"]) == 6 * 2 * 3
    assert {row["num_output_tokens"] for row in record["rows"]} == {12}
    assert record["workload"]["name"] == "demo"


def test_people_get_a_table_and_a_verdict(served: Served) -> None:
    shown = run(*two_arms(served), "--arm", f"two={served.url}", *QUICK)
    assert shown.exit_code == 0, shown.output
    assert "6 prompts × 2 rounds" in shown.stdout
    assert "same text" in shown.stdout
    assert "noise floor: not measured" in shown.stdout
    assert "on: " in shown.stdout
    assert "Fastest: " in shown.stdout


def test_an_arm_against_itself_alone(served: Served) -> None:
    shown = run("--arm", f"plain={served.url}", "--aa", *QUICK, "--json")
    assert json.loads(shown.stdout)["summary"]["arm"] == "plain again"


def test_an_arm_that_did_not_what_it_was_asked_fails(served: Served) -> None:
    """The one-token blocks of this server hold no drafts."""
    with serve({"": Script.of_text(ANSWER, drafted=False)}) as silent:
        shown = run("--arm", f"off={served.url}", "--arm", f"on={silent.url},speculative.enabled=true", *QUICK)
    assert shown.exit_code == 1
    assert "drafting was asked to be True" in shown.stdout.replace("\n", " ")


def test_prompts_of_a_length(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "sized.json"
    arguments = [*QUICK, "--prompts", "2", "--prompt-tokens", "50"]
    shown = run(*two_arms(served), *arguments, "--record", str(path))
    assert shown.exit_code == 0, shown.output
    record = json.loads(path.read_text())
    assert {row["num_prompt_tokens"] for row in record["rows"]} == {50}
    assert record["workload"]["name"] == "demo, 50 tokens"


def test_without_arms_the_embedded_default_plainly_and_with_its_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, plain = embedded_llm(), plain_llm()  # before load is replaced
    monkeypatch.setattr("outrider.load", lambda *_, **__: llm, raising=False)
    monkeypatch.setattr(llm, "without_drafter", lambda: plain)
    shown = run("--prompts", "2", "--rounds", "1", "--warm-up-rounds", "0", "--max-tokens", "6", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert [(arm["name"], arm["drafter"] is None) for arm in found["arms"]] == [("plain", True), ("drafter", False)]
    assert found["summary"]["identical"] is True
    assert found["summary"]["mean_acceptance_length"] >= 1
    assert "not enough prompts for any claim" in found["summary"]["verdict_text"]


def test_shipped_sets_and_files_are_asked_as_bench_run_asks_them(served: Served, tmp_path: Path) -> None:
    path, mine = tmp_path / "tools.json", tmp_path / "mine.jsonl"
    shown = run(*two_arms(served), *QUICK, "--prompts", "2", "--workload", "tools", "--record", str(path))
    assert shown.exit_code == 0, shown.output
    record = json.loads(path.read_text())
    assert record["workload"] == {"name": "tools", "sha256": RequestSet("tools", TOOLS.items[:2]).workload.sha256}
    assert "get" in served.backend.tokenizer.decode(served.backend.submitted[-1][0])
    mine.write_text('{"turns": ["One?"]}\n{"turns": ["Two?"]}\n')
    shown = run(*two_arms(served), *QUICK[2:], "--workload", str(mine), "--json")
    assert json.loads(shown.stdout)["summary"]["num_prompts"] == 2
    assert "Two?" in served.backend.tokenizer.decode(served.backend.submitted[-1][0])


def test_chats_are_asked_of_local_arms_in_the_targets_own_template(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, plain = embedded_llm(), plain_llm()
    monkeypatch.setattr("outrider.load", lambda *_, **__: llm, raising=False)
    monkeypatch.setattr(llm, "without_drafter", lambda: plain)
    asked = list[str]()
    real = llm.encode
    monkeypatch.setattr(llm, "encode", lambda prompt: asked.append(prompt) or real(prompt))
    small = ("--prompts", "2", "--rounds", "1", "--warm-up-rounds", "0", "--max-tokens", "4", "--json")
    shown = run(*small, "--workload", "math")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["summary"]["identical"] is True
    assert all("User: " in prompt and prompt.endswith("Assistant:") for prompt in asked)
    refused = run(*small, "--workload", "tools")
    assert isinstance(refused.exception, OutriderError)
    assert "knows no tools" in str(refused.exception)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--arm", "a=local:plain"], "a is alone"),
        (["--arm", "a=local:plain", "--arm", "a=local:drafter"], "two arms have one name"),
        (["--arm", "a"], "has no name"),
        (["--workload", "novels"], "none of narrative, code, chat, tools, math, languages, long-context, demo"),
        (["--prompts", "1"], f"from 2 to {len(DEMO.prompts)}"),
        (["--rounds", "0"], "--rounds 0"),
        (["--warm-up-rounds", "-1"], "--warm-up-rounds -1"),
        (["--max-tokens", "1"], "--max-tokens 1"),
        (["--claim", "0"], "--claim 0"),
        (["--confidence", "0.5"], "--confidence 0.5"),
        (["--method", "z"], "choose one of t, bca"),
    ],
)
def test_bad_input_is_refused_with_exit_code_2(arguments: list[str], named: str) -> None:
    shown = run(*arguments)
    assert isinstance(shown.exception, OutriderError)
    assert shown.exception.exit_code == 2
    with pytest.raises(OutriderError, match=named):
        raise shown.exception


def test_records_are_kept_and_servers_that_are_away_are_named(tmp_path: Path) -> None:
    path = tmp_path / "there.json"
    path.write_text("{}")
    assert "never overwritten" in str(run("--record", str(path)).exception)
    away = run("--arm", "a=http://127.0.0.1:9", "--arm", "b=http://127.0.0.1:9")
    assert isinstance(away.exception, EngineFault)
    assert "127.0.0.1:9" in str(away.exception)
