from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.output import emit_json, new_file, progress_bar, progress_line
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
