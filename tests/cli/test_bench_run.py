from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.backends.planted import Planted
from outrider.cli.main import app
from outrider.errors import ConfigError, OutriderError
from tests.serving import serve

PLAN = Planted(acceptance_by_position=(0.8, 0.4), step_s=0.002, draft_token_s=0.0002)
SMALL = ["--num-requests", "3", "--num-warmups", "1", "--max-tokens", "16"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve({"": PLAN}, context_length=8192) as served:
        yield served.url


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "160"}, catch_exceptions=True)


def test_run_prints_one_object_and_writes_one_record(url: str, tmp_path: Path) -> None:
    record = tmp_path / "new" / "run.json"
    shown = run("run", url, *SMALL, "-w", "code", "--ignore-eos", "--json", "--record", str(record))
    assert shown.exit_code in (0, 1), shown.output  # 1 where this machine is too busy to measure on
    found = json.loads(shown.stdout)
    assert (found["num_requests"], found["num_output_tokens"], found["completed"]) == (3, 48, 3)
    assert found["mean_acceptance_length"] == pytest.approx(2.2, abs=0.3)
    written = json.loads(record.read_text())
    assert (written["name"], written["summary"]) == ("run", found)
    assert written["arms"][0]["settings"]["extra"] == {"ignore_eos": True}
    assert written["workload"]["name"] == "code"
    assert isinstance(run("run", url, *SMALL, "--record", str(record)).exception, ConfigError)


def test_run_shows_a_table(url: str) -> None:
    shown = run("run", url, *SMALL, "--request-rate", "50", "-w", "demo")
    assert "scripted on outrider: demo" in shown.stdout
    assert "first token, ms" in shown.stdout
    assert "acceptance length 2." in shown.stdout
    assert "integrity: " in shown.stdout


def test_a_spoiled_run_is_named_and_fails(url: str) -> None:
    shown = run("run", url, *SMALL, "--expected-cached-share", "0.9")
    assert shown.exit_code == 1
    assert "INVALID cache_bypass" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "localhost"], "no URL"),
        (["run", "URL", "-w", "nope"], "no file and none of"),
        (["run", "URL", "-w", "chat", "-w", "code"], "one workload"),
        (["run", "URL", "--concurrency", "0"], "concurrency is 0"),
        (["run", "URL", "--body", "x"], "not NAME=JSON"),
        (["run", "URL", "--body", "x={"], "not NAME=JSON"),
        (["run", "URL", "--body", "stream=false"], "--body stream"),
        (["run", "URL", "--temperature", "nan"], "temperature is nan"),
        (["run", "URL", "--request-rate", "nan"], "request_rate is nan"),
        (["run", "http://127.0.0.1:9"], "Is the server running"),
    ],
)
def test_bad_input_is_refused(url: str, arguments: list[str], named: str) -> None:
    shown = run(*[url if each == "URL" else each for each in arguments])
    assert isinstance(shown.exception, OutriderError), shown.output
    assert named in str(shown.exception)
