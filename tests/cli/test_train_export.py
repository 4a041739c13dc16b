from __future__ import annotations

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.errors import ConfigError
from outrider.weights.loader import directory_sha256

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
    assert "in layout z-lab; its reader takes embed_tokens.weight and lm_head.weight of the target" in " ".join(
        told.stderr.split()
    )


def test_what_a_layout_cannot_say_is_refused(tmp_path: Path) -> None:
    refused = run("auto", "--layout", "vllm", "--out", tmp_path / "out")
    assert isinstance(refused.exception, ConfigError)
    assert "its block embeddings are scaled" in str(refused.exception)
    assert not list(tmp_path.iterdir())


def test_a_card_holds_figures_of_the_record_that_measured_this_very_drafter(tmp_path: Path) -> None:
    drafter = GOLDEN / "zlab-dflash" / "drafter"
    cell = {"drafter": "it", "domain": "code", "temperature": 0.0, "mean_acceptance_length": 2.125, "baseline": "it"}
    cell |= {"difference": None, "interval": None, "confidence": 0.95, "num_prompts": 3}
    fields = {"schema": 1, "name": "train-select", "environment": {}, "workload": {"name": "code", "sha256": "0"}}
    fields |= {"rows": [], "arms": [{"name": "it", "drafter_sha256": directory_sha256(drafter)}], "summary": [cell]}
    path = tmp_path / "record.json"

    def export(record: dict[str, object], out: str) -> Result:
        path.write_text(json.dumps(record))
        options = ("--layout", "z-lab", "--out", tmp_path / out, "--record", path, "--licence", "gemma")
        return run(drafter, *options)

    assert export(fields, "out").exit_code == 0
    assert "| code | 0 | 2.125 | the baseline itself | – | 3 |" in (tmp_path / "out" / "README.md").read_text()
    other = {**fields, "arms": [{"name": "other", "drafter_sha256": "1"}]}
    for record, words in (
        (other, "the record measured other, none of which is this drafter"),
        ({**fields, "name": "demo"}, "is of demo. Give one that `train select --record` wrote"),
        ({**fields, "complete": False}, "a run that was stopped"),
    ):
        refused = export(record, "new")
        assert isinstance(refused.exception, ConfigError)
        assert words in str(refused.exception)
    assert not (tmp_path / "new").exists()
