from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.backends import inspection
from outrider.cli.main import app
from outrider.errors import LocateError


@pytest.fixture(autouse=True)
def _quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "inspect_target", lambda *_, **__: {"model_type": "gemma3_text"})
    monkeypatch.setattr(inspection, "probe_drafting", lambda *_, **__: {"same_text_as_plain": True})


def test_a_sound_machine_exits_0() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(shown.stdout)
    assert shown.exit_code == 0
    assert found["ok"] is True
    assert [check["name"] for check in found["checks"]] == ["kernels", "target", "drafter", "drafting"]


def test_a_problem_is_named_and_exits_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> dict[str, object]:
        raise LocateError("no weights here")

    monkeypatch.setattr(inspection, "inspect_target", fail)
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 2
    assert "no weights here" in shown.stdout
    assert "PROBLEM" in shown.stdout
    assert "not checked" in shown.stdout


def test_a_cache_that_is_a_file_is_a_problem_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_bytes(b"")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(shown.stdout)
    assert shown.exit_code == 2
    kernels = found["checks"][0]
    assert (found["ok"], kernels["name"], kernels["ok"]) == (False, "kernels", False)
    assert "Set OUTRIDER_CACHE to a directory" in kernels["problem"]
