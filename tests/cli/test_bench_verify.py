from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.errors import ConfigError
from tests.benchmarking.test_verify import SOUND
from tests.serving import serve

SMALL = ["--needle-tokens", "1000,3000", "--essay-tokens", "600"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "verify", *arguments], env={"COLUMNS": "160"}, catch_exceptions=True)


def test_a_sound_server_passes_and_a_record_is_written(tmp_path: Path) -> None:
    record = tmp_path / "verify.json"
    with serve(SOUND, context_length=8192) as served:
        shown = run(served.url, *SMALL, "--json", "--record", str(record))
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert (found["verdict"], {rung["status"] for rung in found["rungs"]}) == ("pass", {"pass"})
    assert found["greedy"].items() >= {"num_ties": 0, "num_faults": 0, "rate": 0.0, "tolerance": 0.0}.items()
    written = json.loads(record.read_text())
    assert (written["rows"], written["arms"][0]["target"]) == (found["rungs"], "scripted")


def test_a_failed_rung_is_exit_code_1_and_says_what_to_do(tmp_path: Path) -> None:
    record = tmp_path / "verify.json"
    shown = run("http://127.0.0.1:9", *SMALL, "--record", str(record))
    assert shown.exit_code == 1
    assert "Start the server" in shown.stdout
    assert json.loads(record.read_text())["summary"]["failed"] == ["reachable"]


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--skip", "speed"], "--skip 'speed'"), (["--needle-tokens", "many"], "--needle-tokens")]
)
def test_bad_input_is_refused(arguments: list[str], named: str) -> None:
    shown = run("http://127.0.0.1:9", *arguments)
    assert isinstance(shown.exception, ConfigError)
    assert named in str(shown.exception)
