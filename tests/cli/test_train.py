from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import outrider.backends.local  # noqa: F401 - before a test patches what it imports by name
from outrider.cli.main import app, main
from outrider.errors import ConfigError
from outrider.training import pipeline
from outrider.weights import locate
from tests.training import tiny

RECIPE = str(Path(__file__).parents[2] / "recipes" / "gemma3-270m-dflash.toml")


def test_generate_and_run_pass_on_what_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(locate, "locate_target", lambda _name: tmp_path)
    monkeypatch.setattr(pipeline, "make_text", lambda *given, **_: calls.append(given) or {"num_tokens": 5})
    record = {"finished": True, "num_steps_done": 3, "held_out": 1}
    monkeypatch.setattr(
        pipeline,
        "train_drafters",
        lambda *given, **named: calls.append((*given, named)) or {"a": {**record, "log": []}},
    )
    data, out = str(tmp_path / "text.pt"), str(tmp_path / "out")
    written = CliRunner().invoke(
        app, ["train", "generate", RECIPE, "--data", data, "--device", "cpu", "--json"], catch_exceptions=False
    )
    trained = CliRunner().invoke(
        app, ["train", "run", RECIPE, "--data", data, "--out", out, "--device", "cpu", "--json"], catch_exceptions=False
    )
    assert json.loads(written.stdout) == {"num_tokens": 5}
    assert json.loads(trained.stdout) == {"a": record}
    assert calls[0][1].name == calls[1][1][0].name == "gemma3-270m-dflash"
    assert calls[1][3] == Path(out)
    assert calls[1][4]["options"].keeping is None


def write_recipe(path: Path) -> Path:
    """The tiny recipe as TOML; JSON writes its numbers, strings, booleans and lists the same way."""
    table = asdict(tiny.recipe(optimize={"num_steps": 2}))
    sections = {key: table.pop(key) for key in ("generate", "drafter", "optimize")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    for name, section in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    path.write_text("\n".join(lines))
    return path


def test_calls_that_stop_early_go_on_from_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, recipe = str(tiny.write_target(tmp_path / "target")), str(write_recipe(tmp_path / "tiny.toml"))
    data, kept = str(tmp_path / "text.pt"), str(tmp_path / "run.pt")
    shared = [recipe, "--data", data, "--target", target, "--device", "cpu", "--json"]
    run = ["train", "run", *shared, "--out", str(tmp_path)]
    assert CliRunner().invoke(app, ["train", "generate", *shared], catch_exceptions=False).exit_code == 0
    stopping = [*run, "--checkpoint", kept, "--checkpoint-every-steps", "5", "--stop-after-s", "0"]
    for num_done in (1, 2):
        ended = CliRunner().invoke(app, stopping, catch_exceptions=False)
        shown = json.loads(ended.stdout)["tiny"]
        assert (ended.exit_code, shown["num_steps_done"], shown["finished"]) == (0, num_done, num_done == 2)
        assert (tmp_path / "tiny" / "model.safetensors").is_file()
        assert ("run the same command again" in ended.stderr) == (num_done == 1)

    other = Path(recipe).with_name("other.toml")
    other.write_text(Path(recipe).read_text().replace("learning_rate = 0.01", "learning_rate = 0.02"))
    for wrong, named in (
        ([*run, "--stop-after-s", "9"], "--checkpoint FILE"),
        ([*run[:2], str(other), *run[3:], "--checkpoint", kept], "learning_rate is 0.01 there, 0.02 here"),
    ):
        monkeypatch.setattr(sys, "argv", ["outrider", *wrong])
        with pytest.raises(SystemExit) as refused:
            main()
        assert refused.value.code == 2
        assert named in " ".join(capsys.readouterr().err.split())


def test_answers_to_conversations_are_written_described_and_trained_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, recipe = str(tiny.write_target(tmp_path / "target")), str(write_recipe(tmp_path / "tiny.toml"))
    # 22 characters of template leave 2 of 24 tokens, so this recipe's sequences are longer; the target's window is 40.
    Path(recipe).write_text(Path(recipe).read_text().replace("sequence_tokens = 24", "sequence_tokens = 40"))
    asked = tmp_path / "asked.jsonl"
    asked.write_text("\n".join(json.dumps({"prompt": letter}) for letter in "abcdefgh"))
    data = tmp_path / "answers.pt"
    shared = [recipe, "--data", str(data), "--target", target, "--device", "cpu", "--json"]
    asking = ["train", "generate", *shared, "--conversations", str(asked)]
    written = CliRunner().invoke(app, asking, catch_exceptions=False)
    card = json.loads(written.stdout)
    assert card["num_conversations"] == 8
    assert json.loads(data.with_name("answers.pt.card.json").read_text()) == card
    assert "answered 8/8 conversations" in written.stderr
    before = sorted(tmp_path.rglob("*"))
    told = CliRunner().invoke(
        app, ["train", "run", *shared, "--out", str(tmp_path), "--preflight"], catch_exceptions=False
    )
    found = json.loads(told.stdout)
    assert found["seconds"] > 0.0
    assert found["peak_bytes"] == sum(found["memory_bytes"].values())
    assert sorted(tmp_path.rglob("*")) == before
    trained = CliRunner().invoke(
        app, ["train", "run", *shared, "--out", str(tmp_path), "--micro-batches", "2"], catch_exceptions=False
    )
    assert "memory: " in trained.stderr
    assert json.loads(trained.stdout)["tiny"]["finished"]

    (tmp_path / "target" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    with pytest.raises(ConfigError, match="chats written with another template than the target's now"):
        CliRunner().invoke(app, ["train", "run", *shared, "--out", str(tmp_path)], catch_exceptions=False)
    (tmp_path / "target" / "chat_template.jinja").unlink()

    asked.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}')
    monkeypatch.setattr(sys, "argv", ["outrider", *asking])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert "line 1: message 1 is an empty assistant turn" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ConfigError, match="sequences of 40 tokens, but the recipe's sequence_tokens is 24"):
        CliRunner().invoke(
            app,
            ["train", "run", str(write_recipe(tmp_path / "short.toml")), *shared[1:], "--out", str(tmp_path)],
            catch_exceptions=False,
        )
