from __future__ import annotations

import json

import pytest

from outrider.cli.output import emit_json, progress_line


def test_json_is_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    progress_line("working")
    emit_json({"a": [1, 2]})
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"a": [1, 2]}
    assert "working" not in shown.out
