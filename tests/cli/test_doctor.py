from __future__ import annotations

import json

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
    assert "no weights here" in shown.stderr
    assert "PROBLEM" in shown.stderr
