from __future__ import annotations

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "drafters"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["train", "export", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_drafter_is_written_and_what_was_written_is_said(tmp_path: Path) -> None:
    target = GOLDEN / "zlab-dflash" / "target"
    drafter = GOLDEN / "speculators-dflash" / "drafter"
    given = ("--layout", "speculators", "--target", target, "--target-name", "owner/name", "--dtype", "float16")
    shown = run(drafter, *given, "--out", tmp_path / "new" / "out", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert {key: found[key] for key in ("drafter", "layout", "borrowed")} == {
        "drafter": str(tmp_path / "new" / "out"),
        "layout": "speculators",
        "borrowed": ["embed_tokens.weight"],
    }
    config = json.loads((tmp_path / "new" / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/name"
    assert config["dtype"] == "float16"
    told = run(GOLDEN / "zlab-dflash" / "drafter", "--layout", "z-lab", "--out", tmp_path / "out")
    assert told.exit_code == 0, told.output
    assert "in layout z-lab; its reader takes embed_tokens.weight and lm_head.weight of the target" in told.stderr


def test_what_a_layout_cannot_say_is_refused(tmp_path: Path) -> None:
    refused = run("auto", "--layout", "vllm", "--out", tmp_path / "out")
    assert isinstance(refused.exception, ConfigError)
    assert "its block embeddings are scaled" in str(refused.exception)
    assert not list(tmp_path.iterdir())
