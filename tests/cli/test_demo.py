from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from tests.embedded import embedded_llm

KEYS = {
    "identical", "speedup", "mean_acceptance_length", "acceptance_outside_repeats", "cycles_outside_repeats",
    "plain_tokens_per_s", "kernel_gain", "prompts",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = embedded_llm()  # before load is replaced
    monkeypatch.setattr("outrider.load", lambda *_, **__: llm, raising=False)


def test_json_has_the_promised_keys_and_a_record_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    shown = CliRunner().invoke(
        app, ["demo", "--json", "--prompts", "2", "--max-tokens", "12", "--record", str(path)], catch_exceptions=False
    )
    summary = json.loads(shown.stdout)
    assert set(summary) >= KEYS
    assert summary["identical"] is True
    assert summary["prompts"] == 2
    record = json.loads(path.read_text())
    assert record["summary"] == summary
    assert {row["arm"] for row in record["rows"]} >= {"plain", "speculative"}


def test_people_get_marked_text_and_a_table() -> None:
    shown = CliRunner().invoke(app, ["demo", "--prompts", "1", "--max-tokens", "12"], catch_exceptions=False)
    assert "same text" in shown.stdout
    assert "yes" in shown.stdout
    assert "accepted drafts" in shown.stderr
