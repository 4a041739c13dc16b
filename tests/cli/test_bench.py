from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.backends import decode_timing, kernel_timing
from outrider.benchmarking.decode import read_result
from outrider.cli import bench
from outrider.cli.main import app
from outrider.errors import ConfigError, OutriderError
from tests.benchmarking.fake_peer import write_site

TINY = ["--target", "tiny", "--device", "cpu", "--kernels", "torch"]
DECODE = ["bench", "decode", *TINY, "--prompt-tokens", "12", "--max-tokens", "5", "--runs", "1"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_timing, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(kernel_timing, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(kernel_timing, "MAX_COPIES", 1)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"}, catch_exceptions=True)


def test_decode_prints_one_object_and_writes_one_record(tmp_path: Path) -> None:
    record = tmp_path / "results" / "tiny.json"
    shown = run(*DECODE, "-n", "0,2", "--batch", "2", "--check-exact", "--json", "--record", str(record))
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    keys = [(row["num_speculative_tokens"], row["batch"]) for row in found["summary"]]
    assert keys == [(0, 2), (2, 2)]
    assert found["summary"][0].keys() >= {"target", "tokens_per_s", "ratio", "floor_share", "bit_exact"}
    written = json.loads(record.read_text())
    assert written["summary"] == found["summary"]
    assert [row["arm"] for row in written["rows"]] == ["outrider"] * 2
    again = run(*DECODE, "--record", str(record))
    assert isinstance(again.exception, ConfigError)


def test_decode_shows_a_table() -> None:
    shown = run(*DECODE)
    assert shown.exit_code == 0, shown.output
    assert "tiny on torch kernels" in shown.stdout
    assert "tok/s" in shown.stdout


def test_a_cell_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time_cell, record = decode_timing.time_cell, tmp_path / "one.json"

    def fail_alone(models: Any, cell: decode_timing.Cell, *rest: Any, **how: Any) -> dict[str, Any]:
        if cell.batch == 1:
            raise RuntimeError("out of memory")
        return time_cell(models, cell, *rest, **how)

    monkeypatch.setattr(decode_timing, "time_cell", fail_alone)
    shown = run(*DECODE, "--batch", "1,2", "--record", str(record))
    assert shown.exit_code == 1, shown.output
    assert "tok/s" in shown.stdout
    assert "missing: outrider, n=0, batch 1, prompt 12: RuntimeError: out of memory" in shown.stderr
    written = json.loads(record.read_text())
    assert [row["batch"] for row in written["rows"]] == [2]
    assert (written["complete"], written["missing"][0]["fault"]) == (False, "RuntimeError: out of memory")


@pytest.fixture
def _ctrl_c_is_heard() -> Iterator[None]:
    """Also where tests run in the background of a shell, which lets them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_is_heard")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_keeps_what_it_had(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_cell, record = decode_timing.time_cell, tmp_path / "one.json"

    def stop_second(models: Any, cell: decode_timing.Cell, *rest: Any, **how: Any) -> dict[str, Any]:
        if cell.batch == 2:
            signal.raise_signal(number)
        return time_cell(models, cell, *rest, **how)

    monkeypatch.setattr(decode_timing, "time_cell", stop_second)
    before = signal.getsignal(signal.SIGTERM)
    shown = run(*DECODE, "--batch", "1,2", "--record", str(record))
    assert shown.exit_code == code, shown.output
    assert "has 1 row, 1 missing" in "".join(shown.stderr.splitlines())
    assert [row["batch"] for row in json.loads(record.read_text())["rows"]] == [1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_peer_that_fails_leaves_ours_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_ours", run_ours_here)
    monkeypatch.setenv("FAKE_VLLM", "broken")
    record, site = tmp_path / "one.json", write_site(tmp_path / "site")
    shown = run(*DECODE, "--peer", "vllm", "--peer-site", str(site), "--record", str(record))
    assert shown.exit_code == 1, shown.output
    written = json.loads(record.read_text())
    assert [row["arm"] for row in written["rows"]] == ["outrider"]
    assert [each["arm"] for each in written["missing"]] == ["vllm", "outrider, again"]
    assert "exit code 3" in written["missing"][0]["fault"]


def run_ours_here(arguments: list[str], path: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """A pass in this process."""
    assert run("bench", "decode", *arguments, "--record", str(path)).exit_code == 0
    keep(read_result(path))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--target", "70b"], "'70b' is not a size"),
        ([*TINY, "-n", "8"], "at most 7"),
        ([*TINY, "-n", "x"], "--num-speculative-tokens"),
        ([*TINY, "-n", "3", "--drafter-quantization", "int3"], "choose one of int8, int4"),
        ([*TINY, "-n", "0", "--drafter-quantization", "int8"], "there is no drafter"),
        ([*TINY, "-n", "2", "--acceptance-length", "4"], "from 1 to 3"),
        ([*TINY, "--max-tokens", "1"], "nothing to time|Give more"),
        ([*TINY, "--peer", "sglang"], "choose one of vllm"),
        ([*TINY, "--peer", "vllm", "--peer-site", "/nowhere"], "has no folder vllm"),
    ],
)
def test_bad_input_is_refused_with_exit_code_2(arguments: list[str], named: str) -> None:
    shown = run("bench", "decode", *arguments)
    assert isinstance(shown.exception, OutriderError)
    assert shown.exception.exit_code == 2
    assert shown.exception.args[0]
    with pytest.raises(OutriderError, match=named):
        raise shown.exception


def test_ours_runs_before_and_after_the_peer_with_the_same_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run_ours(arguments: list[str], path: Path, keep: Callable[[dict[str, Any]], None]) -> None:
        calls.append(arguments)
        run_ours_here(arguments, path, keep)

    monkeypatch.setattr(bench, "run_ours", run_ours)
    record = tmp_path / "peer.json"
    site = write_site(tmp_path / "site")
    drafting = ["-n", "1", "--acceptance-length", "1.5", "--batch", "2", "--drafter-quantization", "int8"]
    work = [*drafting, "--prompt-tokens", "12,20", "--check-exact"]
    peer = ["--peer", "vllm", "--peer-site", str(site), "--peer-logs", str(tmp_path / "logs")]
    shown = run(*DECODE, *work, *peer, "--record", str(record), "--json")
    assert shown.exit_code == 0, shown.output
    assert len(calls) == 2
    place = calls[0].index("--traced-cycles") + 1
    assert calls[0][place] == "8"
    once = [*calls[0][:place], "0", *calls[0][place + 1 :]]
    once.remove("--check-exact")
    assert calls[1] == once  # parts and exactness are looked at once
    assert not any(text.startswith("--peer") for text in calls[0])
    assert calls[0][calls[0].index("--drafter-quantization") + 1] == "int8"
    found = json.loads(shown.stdout)
    assert [row["prompt_tokens"] for row in found["summary"]] == [12, 20]
    assert all(row["peer_tokens_per_s"] > 0 and row["ratio"] > 0 for row in found["summary"])
    assert all(row["peer_prefill_s"] > 0 and row["prefill_ratio"] > 0 for row in found["summary"])
    assert (len(found["again"]), len(found["peer"])) == (1, 2)
    assert {path.name for path in (tmp_path / "logs").iterdir()} >= {"ours.json", "vllm-n1.log", "vllm-n1.jsonl"}
    refused = run(*DECODE, *work, *peer)
    assert isinstance(refused.exception, ConfigError)
    assert [arm["name"] for arm in json.loads(record.read_text())["arms"]] == ["outrider", "vllm", "outrider, again"]


def test_kernels_alone_as_a_table_and_as_an_object() -> None:
    shown = run("bench", "kernel", *TINY, "--contexts", "20", "--kernel", "attention")
    assert shown.exit_code == 0, shown.output
    assert "attention" in shown.stdout
    shown = run("bench", "kernel", *TINY, "--rows", "1,2", "--kernel", "products", "--json")
    assert {row["rows"] for row in json.loads(shown.stdout)["rows"]} == {1, 2}
    refused = run("bench", "kernel", *TINY, "--rows", "0")
    assert isinstance(refused.exception, ConfigError)
