from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.benchmarking.report.records import read_record
from outrider.benchmarking.report.sections import section_of
from outrider.cli import train_select
from outrider.cli.main import app
from outrider.errors import ConfigError
from outrider.training import acceptance
from outrider.training.export import export_drafter
from outrider.weights.loader import directory_sha256
from tests.training import tiny


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["train", "select", *map(str, arguments)], env={"COLUMNS": "80"})


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A target, two drafters of the same folder name, and two domains of prompts."""
    tiny.write_target(tmp_path / "target")
    trainer = tiny.trainer(tiny.recipe())
    export_drafter(trainer, tmp_path / "a" / "step", record={})
    export_drafter(tiny.trainer(tiny.recipe(drafter={"is_causal": False})), tmp_path / "b" / "step", record={})
    for domain in ("code", "prose"):
        lines = [json.dumps({"turns": [f"{domain} number {index}"]}) for index in range(3)]
        (tmp_path / f"{domain}.jsonl").write_text("\n".join(lines))
    return tmp_path


def asked(here: Path) -> list[str | Path]:
    domains = ["--workload", here / "code.jsonl", "--workload", here / "prose.jsonl"]
    target = ["--target", here / "target", "--device", "cpu", "--kernels", "torch", "--context-length", "64"]
    return [here / "b" / "step", "--baseline", here / "a" / "step", *domains, *target, "--max-tokens", "6"]


def test_drafters_are_ranked_and_the_record_holds_what_the_issue_asks(here: Path) -> None:
    record = here / "record.json"
    shown = run(*asked(here), "--prompts", "2", "--temperature", "0", "--temperature", "1", "--record", record)
    assert shown.exit_code == 0, shown.output
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    assert "Best first:" in shown.stdout
    kept: dict[str, Any] = json.loads(record.read_text())
    names = [str(here / "a" / "step"), str(here / "b" / "step")]
    assert [arm["name"] for arm in kept["arms"]] == names
    assert kept["arms"][1]["settings"]["num_speculative_tokens"] == 3
    assert [arm["drafter_sha256"] for arm in kept["arms"]] == [directory_sha256(Path(name)) for name in names]
    assert len(kept["rows"]) == 2 * 2 * 2 * 2  # drafters, temperatures, domains, prompts
    cells = {(each["drafter"], each["domain"], each["temperature"]) for each in kept["summary"]}
    assert cells == {(name, domain, t) for name in names for domain in ("all", "code", "prose") for t in (0.0, 1.0)}
    expected = {"drafter", "domain", "temperature", "mean_acceptance_length", "difference", "interval"}
    assert all(expected <= each.keys() for each in kept["summary"])
    assert {each["baseline"] for each in kept["summary"]} == {names[0]}
    assert kept["workload"]["name"] == "code, prose"
    assert "complete" not in kept
    section = section_of(read_record(record))
    assert section.title == "Drafters ranked by what a cycle is worth"
    assert [chart.title for chart in section.charts] == ["Tokens a cycle is worth, against the baseline"]


def test_json_is_the_record(here: Path) -> None:
    shown = run(*asked(here), "--prompts", "1", "--no-offline", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["name"] == "train-select"
    assert all(each["offline_error_share"] is None for each in found["summary"])


def test_text_that_depends_on_the_drafter_ends_with_1(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = acceptance.measure_drafter

    def wrong(*given: Any, **named: Any) -> Any:
        return [{**row, "output_sha256": row["drafter"]} for row in measure(*given, **named)]

    monkeypatch.setattr(acceptance, "measure_drafter", wrong)
    shown = run(*asked(here), "--prompts", "1", "--no-offline")
    assert shown.exit_code == 1
    assert "which must not be: code, prompt 1; prose, prompt 1" in " ".join(shown.stdout.split())


def test_what_cannot_be_is_refused_before_weights_are_loaded(here: Path) -> None:
    (here / "old.json").write_text("{}")
    drafter = here / "a" / "step"
    for arguments, words in (
        ([drafter, "--target", here / "target"], "--baseline auto is for the embedded default only"),
        ([drafter, "--baseline", drafter, "--target", here], "nothing to compare the baseline with"),
        ([drafter, "--temperature", "-1"], "--temperature -1.0 cannot be"),
        ([drafter, "--rounds", "0"], "--rounds 0 cannot be"),
        ([drafter, "--max-tokens", "1"], "the first token takes no cycle"),
        ([drafter, "--confidence", "95"], "--confidence 95.0 cannot be"),
        ([drafter, "--prompts", "17", "--workload", "code"], "--prompts 17, but code has 16"),
        ([drafter, "--record", here / "old.json"], "records are never overwritten"),
    ):
        refused = run(*arguments)
        assert isinstance(refused.exception, ConfigError), refused.output
        assert words in str(refused.exception)


def test_a_walk_that_tells_another_story_is_said() -> None:
    cell = {"drafter": "new", "domain": "all", "offline_error_share": 0.05, "baseline": "old"}
    assert train_select.offline_remarks([cell]) == [
        "new: the offline walk is 5.0 % off what serving accepted: it cannot be trusted."
    ]
    assert train_select.offline_remarks([{**cell, "offline_error_share": -0.02}]) == [
        "new: the offline walk is 2.0 % off what serving accepted."
    ]
    assert train_select.offline_remarks([{**cell, "offline_error_share": None}]) == []
