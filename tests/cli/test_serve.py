from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.backends import readiness as self_tests
from outrider.backends import serving
from outrider.backends.scripted import Script, ScriptedBackend
from outrider.cli import serve as command
from outrider.cli.main import main
from outrider.core import AcceptanceStats
from outrider.errors import ConfigError, LocateError
from outrider.server import process
from outrider.server.readiness import Readiness


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server was run with, in place of running it."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(process, "run_server", lambda app, boot, **options: seen.update(app=app, boot=boot, **options))
    return seen


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["outrider", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_it_listens_here_only_unless_told(ran: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch) == 0
    assert (ran["host"], ran["port"], ran["drain_s"]) == ("127.0.0.1", 8000, 30.0)
    assert ran["app"].state.names == ("gemma-3-270m",)
    options = ["--host", "0.0.0.0", "--port", "9", "--drain-s", "2"]
    options += ["--served-model-name", "a", "--served-model-name", "b"]
    assert run(monkeypatch, *options) == 0
    assert (ran["host"], ran["port"], ran["drain_s"]) == ("0.0.0.0", 9, 2.0)
    assert ran["app"].state.names == ("a", "b")


@pytest.mark.parametrize(("target", "name"), [(None, "gemma-3-270m"), ("a/b", "a/b"), ("/x/model.gguf", "model")])
def test_the_model_is_called_after_its_target(target: str | None, name: str) -> None:
    assert command._model_name(target) == name


def test_a_wrong_setting_ends_it(
    ran: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--max-seats", "0") == 2
    assert "max_seats=0" in capsys.readouterr().err
    assert run(monkeypatch, "--drain-s", "-1") == 2
    assert "drain_s=-1" in capsys.readouterr().err


def test_a_drafter_that_cannot_load_stops_the_boot_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, str | None]] = []

    def load(target: str | None, *, drafter: str | None, drafter_quantization: str | None, **options: Any) -> str:
        asked.append((drafter, drafter_quantization))
        if drafter is not None:
            raise LocateError("no such drafter")
        return "plain"

    monkeypatch.setattr("outrider.load", load, raising=False)
    with pytest.raises(LocateError):
        command._load(None, "x", False, None, kernels="auto", device="cpu")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="serving plainly.*no such drafter"):
        llm = command._load(None, "x", True, None, kernels="auto", device="cpu", drafter_quantization="int8")  # type: ignore[arg-type]
    assert (llm, asked) == ("plain", [("x", None), ("x", "int8"), (None, None)])


def begin(monkeypatch: pytest.MonkeyPatch, found: Any) -> tuple[Readiness, ScriptedBackend]:
    backend = ScriptedBackend({"": Script.of_text("x")})

    def self_test(*arguments: Any, **options: Any) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(serving, "LocalServing", lambda llm, model: backend)
    monkeypatch.setattr(self_tests, "self_test", self_test)
    monkeypatch.setattr("outrider.weights.locate.locate_target", lambda name: Path("model.gguf"))
    readiness, llm = Readiness(), SimpleNamespace(tokenizer=backend.tokenizer)
    try:
        command._begin(readiness, llm, None, model="m", strict=False, plain=False)  # type: ignore[arg-type]
    finally:
        readiness.drain(0.0)
    return readiness, backend


def test_the_doors_open_after_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    readiness, backend = begin(monkeypatch, self_tests.SelfTest("ready", AcceptanceStats()))
    assert readiness.backend is backend
    assert readiness.template.name == "gemma4"
    low = self_tests.SelfTest("acceptance-low", AcceptanceStats(), ("another target",))
    with pytest.warns(UserWarning, match="another target"):
        readiness, _ = begin(monkeypatch, low)
    assert readiness.reasons == ("another target",)


def test_a_self_test_that_fails_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="below"):
        begin(monkeypatch, ConfigError("acceptance below 1.2"))
