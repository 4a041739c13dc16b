from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from outrider.benchmarking.record import RecordFile
from outrider.cli.output import emit_json, new_file, progress_bar, progress_line, stoppable
from outrider.errors import ConfigError


def test_json_is_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    progress_line("working")
    emit_json({"a": [1, 2]})
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"a": [1, 2]}
    assert "working" not in shown.out


def test_a_bar_is_on_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(2) as report:
        report("first")
        report("second")
    assert capsys.readouterr().out == ""


def test_a_record_that_exists_is_refused_before_work_begins(tmp_path: Path) -> None:
    new_file("--record", None)
    new_file("--record", tmp_path / "new" / "file.json")
    (tmp_path / "old.json").touch()
    with pytest.raises(ConfigError, match="never overwritten"):
        new_file("--record", tmp_path / "old.json")


def test_a_hang_up_ends_a_command_and_leaves_its_record(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    found = {"rows": [{"x": 1}], "summary": [{"verdict": "pass"}]}, [{"arm": "a", "num_rows": 3}]
    with pytest.raises(SystemExit), stoppable(RecordFile(path), lambda: found):
        signal.raise_signal(signal.SIGHUP)
    kept = json.loads(path.read_text())
    assert (kept["stopped"], kept["missing"], kept["summary"]) == ("SIGHUP", found[1], [{"verdict": "stopped"}])


def test_a_signal_that_was_ignored_stays_so(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable(RecordFile(tmp_path / "one.json"), lambda: None):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_before_anything_was_found_is_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), stoppable(RecordFile(tmp_path / "one.json"), lambda: None):
        raise ConfigError("no such thing")
    assert (list(tmp_path.iterdir()), capsys.readouterr().err) == ([], "")
