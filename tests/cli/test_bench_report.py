from __future__ import annotations

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.errors import ConfigError
from tests.benchmarking.report import made


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "report", *map(str, arguments)], env={"COLUMNS": "160"})


def test_a_folder_of_records_becomes_two_files(tmp_path: Path) -> None:
    paths = made.write(tmp_path, a=made.compare(), b=made.sweep())
    shown = run(tmp_path, "--out", tmp_path / "new" / "out", "--title", "Tuesday", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["records"] == [str(path) for path in paths]
    assert "<h1>Tuesday</h1>" in Path(found["html"]).read_text()
    assert Path(found["markdown"]).read_text().startswith("# Tuesday\n")


def test_people_are_told_where_it_is(tmp_path: Path) -> None:
    (path,) = made.write(tmp_path, a=made.compare())
    shown = run(path, "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert "1 record" in shown.stdout
    assert "report.html" in "".join(shown.stdout.split())


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for arguments in ((tmp_path / "broken.json",), (tmp_path / "gone.json",)):
        refused = run(*arguments, "--out", tmp_path / "out")
        assert isinstance(refused.exception, ConfigError)
        assert str(arguments[0]) in str(refused.exception)
    assert run("--out", tmp_path).exit_code == 2
