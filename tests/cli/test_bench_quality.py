from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.backends.scripted import Script
from outrider.cli.main import app
from outrider.errors import ConfigError
from tests.serving import Served, serve


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"14 loaves": Script.of_text("Answer: 126"), "": Script.of_text("Hm.")}, context_length=8192) as served:
        yield served


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "quality", *arguments], env={"COLUMNS": "160"}, catch_exceptions=True)


def test_our_own_set_prints_one_object_and_writes_one_record(served: Served, tmp_path: Path) -> None:
    record = tmp_path / "quality.json"
    shown = run(served.url, "--limit", "3", "--json", "--record", str(record))
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert (found["num_problems"], found["num_same_text"], found["verdict"]) == (3, 3, "pass")
    written = json.loads(record.read_text())
    assert (written["summary"], len(written["rows"]), written["workload"]["name"]) == (found, 6, "own")
    assert [arm["name"] for arm in written["arms"]] == ["plain", "speculative"]


def test_files_are_asked_and_the_same_text_is_said_first(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps({"question": "A bakery sells 14 loaves.", "answer": "#### 126"}) + "\n")
    shown = run(served.url, "--gsm8k", str(path))
    assert shown.exit_code == 0, shown.output
    assert "1 of 1 answers are the same text" in shown.stdout
    assert "McNemar exact p = 1" in shown.stdout


def test_a_text_that_differs_is_exit_code_1(served: Served) -> None:
    with serve({"": Script.of_text("Answer: 1", drafted=False)}, context_length=8192) as other:
        shown = run(served.url, "--limit", "1", "--plain-url", other.url)
    assert shown.exit_code == 1
    assert "0 of 1 answers are the same text" in shown.stdout
    assert "fault: some answers differ" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--human-eval"], "--allow-code-execution"),
        (["--limit", "0"], "--limit 0"),
        (["--gsm8k", "/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_bad_input_is_refused(served: Served, arguments: list[str], named: str) -> None:
    shown = run(served.url, *arguments)
    assert isinstance(shown.exception, ConfigError)
    assert named in str(shown.exception)
