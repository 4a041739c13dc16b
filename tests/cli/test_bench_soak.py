from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.backends.scripted import Script
from outrider.cli.main import app
from outrider.errors import ConfigError, OutriderError
from tests.serving import serve

SMALL = ["--shape", "quick", "--sessions", "6", "--turns", "1"]
TEXT = Script.of_text("All is well.")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "soak", *arguments], env={"COLUMNS": "160"}, catch_exceptions=True)


def test_a_soak_prints_one_object_and_writes_one_record(tmp_path: Path) -> None:
    record = tmp_path / "soak.json"
    with serve({"": TEXT}) as served:
        options = ["--min-retention", "0.01", "--server-pid", str(os.getpid()), "--json", "--record", str(record)]
        shown = run(served.url, *SMALL, *options)
    found = json.loads(shown.stdout)
    assert (found["num_turns"], found["num_errors"], found["num_empty"]) == (6, 0, 0)
    assert found["limits"]["min_speed_retention"] == 0.01
    written = json.loads(record.read_text())
    assert (written["summary"], len(written["rows"]), written["workload"]["name"]) == (found, 6, "soak-quick")
    assert (written["arms"][0]["backend"], written["arms"][0]["target"]) == ("outrider", "scripted")
    assert written["rows"][0]["memory_bytes"] > 0


def test_a_server_that_goes_mute_fails_the_soak_and_the_table_says_so() -> None:
    with serve({"": Script.of_text("")}) as served:
        shown = run(served.url, *SMALL)
    assert shown.exit_code == 1
    assert "FAIL" in shown.stdout
    assert "0, 6" in shown.stdout
    assert "fault: num_empty" in shown.stderr


def test_tools_that_are_refused_are_seen_in_the_first_error() -> None:
    with serve({"": Script.of_text("x", refusal=OutriderError("no such luck"))}) as served:
        shown, toolless = run(served.url, *SMALL), run(served.url, *SMALL, "--no-tools")
    assert shown.exit_code == 1
    assert "first error: HTTP" in shown.stderr
    assert "no such luck" in shown.stderr
    assert "that knows no tools: --no-tools" in shown.stderr
    assert "No turn was timed" in shown.stdout
    assert "nothing was drafted" not in shown.stderr
    assert "that knows no tools" not in toolless.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["http://127.0.0.1:9", "--shape", "long"], "--shape"),
        (["http://127.0.0.1:9", "--sessions", "0"], "--sessions"),
        (["http://127.0.0.1:9", "--scale", "0"], "--scale"),
        (["127.0.0.1:9"], "is no URL"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], named: str) -> None:
    shown = run(*arguments)
    assert isinstance(shown.exception, ConfigError)
    assert named in str(shown.exception)
