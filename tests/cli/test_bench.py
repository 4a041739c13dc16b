from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.backends import decode_timing, kernel_timing
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


def test_parts_are_shown_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    part = {"half": "verify", "part": "products", "ms": 2.0, "floor_ms": 1.5, "tb_per_s": 3.0, "floor_share": 0.75}
    seen = {"half": "verify", "part": "other", "kernel": "odd", "grid": [1], "per_cycle": 2.0, "us": 5.0}
    cell = {"num_speculative_tokens": 7, "batch": 1, "prompt_tokens": 9}
    bench.show(bench._parts_table({**cell, "parts": [part], "kernels_seen": [seen]}))
    text = capsys.readouterr().out
    assert "75 %" in text
    assert "other: odd" in text


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

    def run_ours(arguments: list[str]) -> dict[str, Any]:
        calls.append(arguments)
        inner = run("bench", "decode", *arguments, "--json")
        found: dict[str, Any] = json.loads(inner.stdout)
        return found

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
