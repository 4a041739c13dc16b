"""Answers to conversations on a GPU: the embedded default, with its drafter and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app

RECIPE = str(Path(__file__).parents[2] / "recipes" / "gemma3-270m-dflash-cpu.toml")


@pytest.mark.gpu
def test_a_drafter_changes_no_answer_of_a_corpus(tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    turns = [["Tell a story about a bee.", "Go on."], ["What is a lock keeper?"], ["Wie ist das Wetter in Wien?"]]
    asked.write_text("\n".join(json.dumps({"turns": each}) for each in turns))
    made = []
    for name, more in (("plain", ["--no-drafter", "--concurrency", "1"]), ("drafted", [])):
        data = str(tmp_path / f"{name}.pt")
        command = ["train", "generate", RECIPE, "--data", data, "--conversations", str(asked), "--max-tokens", "40"]
        result = CliRunner().invoke(app, [*command, "--device", "cuda", "--json", *more], catch_exceptions=False)
        assert result.exit_code == 0
        rows = (tmp_path / f"{name}.pt.answers.jsonl").read_text().splitlines()[1:]
        made.append((json.loads(result.stdout), sorted(rows)))
    assert made[0] == made[1]
    assert made[0][0]["num_samples"] >= 3
