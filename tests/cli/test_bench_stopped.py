"""Every command that asks servers keeps what it has found when it is stopped. Seen red: writing at the end alone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.backends.scripted import Script
from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest, ServerClient
from outrider.benchmarking.report.build import build_report
from outrider.benchmarking.report.markdown import markdown
from outrider.benchmarking.report.records import read_record
from outrider.cli.main import app
from outrider.errors import EngineFault
from tests.serving import eventually, serve

SHORT = ["--num-requests", "4", "--num-warmups", "1", "--max-tokens", "16"]
SWEEP = ["-n", "0,3", "-w", "chat", "--rounds", "2", *SHORT]
ARMS = ["--arm", "off=URL,speculative.enabled=false", "--arm", "on=URL"]
PAIRS = [*ARMS, "--prompts", "2", "--rounds", "4", "--warm-up-rounds", "0", "--max-tokens", "16"]
RUNGS = ["--skip", "tools", "--skip", "quality", "--skip", "needle"]
CASES: list[tuple[list[str], int, int, int]] = [  # the command, the request it is stopped at, rows kept and missing
    (["run", "URL", *SHORT], 4, 2, 2),
    (["run", "URL", "--request-rate", "1000", *SHORT, "--num-warmups", "0"], 4, 3, 1),
    (["sweep", "URL", *SWEEP], 12, 8, 8),
    (["compare", *PAIRS], 8, 7, 9),
    (["soak", "URL", "--shape", "quick", "--sessions", "5", "--turns", "1"], 4, 3, 2),
    (["verify", "URL", *RUNGS], 2, 6, 3),
    (["quality", "URL", "--limit", "4"], 5, 4, 4),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve({"": Script.of_text("Each colony has one queen.")}, context_length=8192) as served:
        yield served.url


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Also where tests run in the background of a shell, which lets them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def end_at(number: int, cause: signal.Signals | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a request of this number, of those that the client streams, end the command."""
    complete, num_asked, num_answered = ServerClient.complete, 0, 0

    def ask(client: ServerClient, request: ChatRequest) -> Sample:
        nonlocal num_asked, num_answered
        num_asked += 1
        if num_asked == number:
            if isinstance(cause, Exception):
                raise cause
            eventually(lambda: num_answered == number - 1)
            os.kill(os.getpid(), cause)
            time.sleep(0.5)  # in a thread of a load: an answer that does not come in time
        answered = complete(client, request)
        num_answered += 1
        return answered

    monkeypatch.setattr(ServerClient, "complete", ask)


def run(url: str, arguments: list[str], *more: str) -> Result:
    asked = [each.replace("URL", url) for each in arguments]
    return CliRunner().invoke(app, ["bench", *asked, *more], env={"COLUMNS": "160"}, catch_exceptions=True)


@pytest.mark.parametrize(("arguments", "number", "num_kept", "num_missing"), CASES, ids=[each[0][0] for each in CASES])
def test_what_was_found_before_a_stop_is_kept(
    arguments: list[str],
    number: int,
    num_kept: int,
    num_missing: int,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = tmp_path / "one.json"
    end_at(number, signal.SIGTERM, monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    shown = run(url, arguments, "--record", str(record))
    assert (shown.exit_code, signal.getsignal(signal.SIGTERM)) == (1, before), shown.output
    kept = json.loads(record.read_text())
    assert (kept["complete"], kept["stopped"], len(kept["rows"])) == (False, "SIGTERM", num_kept)
    assert sum(each.get("num_rows", 1) for each in kept["missing"]) == num_missing
    assert f"has {num_kept} rows, {num_missing} missing" in "".join(shown.stderr.splitlines())
    summaries = kept["summary"] if isinstance(kept["summary"], list) else [kept["summary"]]
    assert {each.get("verdict", "stopped") for each in summaries} == {"stopped"}
    said = markdown(build_report([read_record(record)]))
    assert f"The run was stopped (SIGTERM): {num_kept} rows were kept, {num_missing} are missing." in said


def test_ctrl_c_and_a_fault_keep_rows_too(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["soak", "URL", "--shape", "quick", "--sessions", "5", "--turns", "1", "--record"]
    with monkeypatch.context() as patch:
        end_at(3, signal.SIGINT, patch)
        assert run(url, arguments, str(tmp_path / "one.json")).exit_code == 130
    assert json.loads((tmp_path / "one.json").read_text())["stopped"] == "Ctrl-C"
    end_at(3, EngineFault("it is gone"), monkeypatch)
    assert isinstance(run(url, arguments, str(tmp_path / "two.json")).exception, EngineFault)
    assert json.loads((tmp_path / "two.json").read_text())["stopped"] == "it is gone"


def test_a_stop_before_the_first_row_leaves_no_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_at(1, signal.SIGTERM, monkeypatch)
    shown = run(url, CASES[0][0], "--record", str(tmp_path / "one.json"))
    assert "stopped: nothing was finished" in shown.stderr
    assert list(tmp_path.iterdir()) == []


def test_figures_of_a_stopped_comparison_are_those_of_its_whole_rounds(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_at(12, signal.SIGTERM, monkeypatch)
    run(url, ["compare", *PAIRS], "--record", str(tmp_path / "one.json"))
    kept = json.loads((tmp_path / "one.json").read_text())
    assert (len(kept["rows"]), kept["summary"]["num_rounds"], kept["summary"]["verdict"]) == (11, 2, "stopped")
    assert "nothing is claimed" in kept["summary"]["verdict_text"]
