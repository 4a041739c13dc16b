from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.backends.planted import Planted
from outrider.cli import bench_run
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


def test_sweep_prints_rows_and_writes_one_record(url: str, tmp_path: Path) -> None:
    record = tmp_path / "sweep.json"
    options = ["-n", "0,2", "-w", "chat", "--rounds", "1", "--json", "--record", str(record)]
    shown = run("sweep", url, *SMALL, *options)
    assert shown.exit_code in (0, 1), shown.output
    rows = json.loads(shown.stdout)["summary"]
    assert [row["num_speculative_tokens"] for row in rows] == [0, 2]
    assert json.loads(record.read_text())["summary"] == rows


def test_sweep_shows_a_table_and_a_verdict(url: str) -> None:
    shown = run("sweep", url, *SMALL, "-n", "0,2", "-w", "chat", "--rounds", "1", "--context-tokens", "900")
    assert "speed by draft length" in shown.stdout
    assert "is fastest" in shown.stdout


def test_sweep_goes_over_servers_that_were_started_with_a_length_each(url: str, tmp_path: Path) -> None:
    record = tmp_path / "servers.json"
    options = ["-w", "chat", "--rounds", "1", "--json", "--record", str(record)]
    with serve({"": replace(PLAN, acceptance_by_position=())}, context_length=8192) as plain:
        shown = run("sweep", f"0={plain.url}", f"2={url}", *SMALL, *options)
    assert shown.exit_code in (0, 1), shown.output
    written = json.loads(record.read_text())
    assert [arm["settings"]["url"] for arm in written["arms"]] == [plain.url, url]
    lengths = {row["num_speculative_tokens"]: row["mean_acceptance_length"] for row in written["summary"]}
    assert lengths == {0: None, 2: pytest.approx(2.2, abs=0.3)}


def test_losing_is_said_and_so_is_a_tie() -> None:
    row = {"workload": "chat", "concurrency": 1, "context_tokens": None, "temperature": 0.0, "faults": []}
    best = {**row, "num_speculative_tokens": 0, "is_best": True, "drafter_loses": True, "ratio_interval": None}
    other = {**best, "num_speculative_tokens": 3, "is_best": False, "ratio_interval": [0.97, 1.01]}
    assert bench_run._verdict(best, [best, other]).endswith("loses here, n = 0 is fastest; not told apart from n = 3")
    slower = {**other, "ratio_interval": [0.9, 0.95]}
    best |= {"num_speculative_tokens": 5, "drafter_loses": False}
    assert bench_run._verdict(best, [best, slower]).endswith("n = 5 is fastest")
    spoiled = {**slower, "faults": ["client_bound"]}
    assert "runs were spoiled" in bench_run._verdict(best, [best, spoiled])


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
        (["sweep", "URL", "--temperature", "nan"], "below 0"),
        (["sweep", "URL", "-n", "3"], "two or more"),
        (["sweep", "URL", "-n", "a"], "--num-speculative-tokens"),
        (["sweep", "URL", "URL"], "0=URL 4=URL"),
        (["sweep", "0=URL", "x=URL"], "0=URL 4=URL"),
        (["sweep", "0=URL", "00=URL"], "two servers have one draft length"),
        (["sweep", "0=URL", "4=URL", "-n", "0,4"], "Leave it out"),
        (["sweep", "4=URL"], "two or more"),
        (["sweep", "URL", "--temperature", "x"], "--temperature"),
        (["sweep", "URL", "--temperature", "-1"], "below 0"),
        (["sweep", "URL", "-n", "0,2", "-w", "chat", "--context-tokens", "9"], "tokens as it is"),
        (
            ["sweep", "URL", "-n", "0,2", "-w", "long-context", "--context-tokens", "90"],
            "refused a prompt of long-context",
        ),
        (["run", "http://127.0.0.1:9"], "Is the server running"),
    ],
)
def test_bad_input_is_refused(url: str, arguments: list[str], named: str) -> None:
    shown = run(*[url if each == "URL" else each for each in arguments])
    assert isinstance(shown.exception, OutriderError), shown.output
    assert named in str(shown.exception)


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_missing_packages_are_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "find_spec", lambda name: None if name == "httpx" else object())
    shown = run(command, "http://127.0.0.1:9")
    assert "httpx not installed. Run: pip install 'outrider[bench]'" in str(shown.exception)


def test_fields_of_the_body() -> None:
    given = ['speculative={"enabled": false}', "top_p=0.9"]
    assert bench_run.body_fields(given, ignore_eos=True) == {
        "ignore_eos": True,
        "speculative": {"enabled": False},
        "top_p": 0.9,
    }
