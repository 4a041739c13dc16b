from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.training import pipeline
from outrider.weights import locate

RECIPE = str(Path(__file__).parents[2] / "recipes" / "gemma3-270m-dflash.toml")


def test_generate_and_run_pass_on_what_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(locate, "locate_target", lambda _name: tmp_path)
    monkeypatch.setattr(pipeline, "make_text", lambda *given, **_: calls.append(given) or {"num_tokens": 5})
    monkeypatch.setattr(pipeline, "train_drafters", lambda *given, **_: calls.append(given) or {"a": {"held_out": 1}})
    data, out = str(tmp_path / "text.pt"), str(tmp_path / "out")
    written = CliRunner().invoke(
        app, ["train", "generate", RECIPE, "--data", data, "--device", "cpu", "--json"], catch_exceptions=False
    )
    trained = CliRunner().invoke(
        app, ["train", "run", RECIPE, "--data", data, "--out", out, "--device", "cpu", "--json"], catch_exceptions=False
    )
    assert json.loads(written.stdout) == {"num_tokens": 5}
    assert json.loads(trained.stdout) == {"a": 1}
    assert calls[0][1].name == calls[1][1][0].name == "gemma3-270m-dflash"
    assert calls[1][3] == Path(out)
