from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.backends import inspection
from outrider.cli.main import app
from outrider.errors import LocateError
from tests.plans import changed_plan, plan_path


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded."""
    monkeypatch.setattr(inspection, "inspect_target", lambda *_, **__: {"model_type": "gemma3_text"})
    monkeypatch.setattr(inspection, "inspect_drafter", lambda *_, **__: {"drafter": None})
    monkeypatch.setattr(inspection, "probe_drafting", lambda *_, **__: {"same_text_as_plain": True})


@pytest.mark.usefixtures("quick_checks")
def test_a_sound_machine_exits_0() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(shown.stdout)
    assert shown.exit_code == 0
    assert found["ok"] is True
    assert [check["name"] for check in found["checks"]] == ["kernels", "target", "drafter", "drafting"]


@pytest.mark.usefixtures("quick_checks")
def test_a_problem_is_named_and_exits_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> dict[str, object]:
        raise LocateError("no weights here")

    monkeypatch.setattr(inspection, "inspect_target", fail)
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 2
    assert "no weights here" in shown.stdout
    assert "PROBLEM" in shown.stdout
    assert "not checked" in shown.stdout


@pytest.mark.usefixtures("quick_checks")
def test_a_cache_that_is_a_file_is_a_problem_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_bytes(b"")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(shown.stdout)
    assert shown.exit_code == 2
    kernels = found["checks"][0]
    assert (found["ok"], kernels["name"], kernels["ok"]) == (False, "kernels", False)
    assert "Set OUTRIDER_CACHE to a directory" in kernels["problem"]


def test_name_plans_at_full_size() -> None:
    """The 31B and its drafter, as a user types it: all is said in words, and nothing is loaded."""
    plans = ["--target", str(plan_path("gemma-4-31B-it")), "--drafter", str(plan_path("gemma-4-31B-it-DFlash"))]
    shown = CliRunner().invoke(app, ["doctor", *plans, "--context-length", "32768"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    for said in (
        "derived: names are derived, not read from the real checkpoint",
        "read: names and shapes were read from a listing of the real checkpoint",
        "tensors_loaded: 832",
        "tensors_skipped: model.embed_vision.* (1), model.vision_tower.* (355)",
        "layers: 5 (4 sliding causal, 1 full bidirectional)",
        "stored_bytes: 57.18 GiB",
        "cache_bytes_per_token: 80.00 KiB",
        "context_length: 32768",
        "a name plan has no numbers",
    ):
        assert said in shown.stdout


def test_a_plan_that_does_not_load_exits_2_and_names_the_tensor(tmp_path: Path) -> None:
    tensors = {"model.language_model.norm.weight": None}
    plan = changed_plan("gemma-4-12B-it", tmp_path / "plan", tensors=tensors)
    shown = CliRunner().invoke(app, ["doctor", "--target", str(plan), "--json"])
    assert shown.exit_code == 2
    target = json.loads(shown.stdout)["checks"][1]
    assert (target["name"], target["ok"]) == ("target", False)
    assert target["problem"].startswith("tensor model.language_model.norm.weight is missing from")


@pytest.mark.parametrize("command", [["generate", "a"], ["demo"]])
def test_a_plan_is_not_run(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--target", str(plan_path("gemma-4-12B-it"))])
    assert shown.exit_code != 0
    assert "it has no numbers, and only `outrider doctor` reads it" in str(shown.exception)
