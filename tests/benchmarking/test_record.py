from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.benchmarking.record import RecordFile, make_record, write_record
from outrider.benchmarking.workloads import TEST


def test_record_carries_environment_and_raw_rows_and_is_never_overwritten(tmp_path: Path) -> None:
    record = make_record("demo", workload=TEST, arms=[{"name": "plain"}], rows=[{"x": 1}], summary={"speedup": 1.5})
    path = tmp_path / "results" / "one.json"
    write_record(record, path)
    read = json.loads(path.read_text())
    assert read["workload"] == {"name": TEST.name, "sha256": TEST.sha256}
    assert read["rows"] == [{"x": 1}]
    assert read["environment"]["python"]
    with pytest.raises(FileExistsError):
        write_record(record, path)


@pytest.mark.parametrize("given", [["--api-key", "secret"], ["--api-key=secret"]])
def test_a_key_stays_out_of_the_command(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["outrider", "bench", *given, "--json"])
    record = make_record("demo", workload=TEST, arms=[], rows=[], summary={})
    assert "secret" not in record["command"]
    assert record["command"].startswith("outrider bench --api-key")
    assert record["command"].endswith(" --json")


def test_a_table_of_cells_made_elsewhere() -> None:
    cells = ({"ratio": 1.1}, {"ratio": 1.2})
    record = make_record("bench", workload=TEST, arms=[], rows=[], summary=cells, machine={"python": "x"})
    assert record["summary"] == [{"ratio": 1.1}, {"ratio": 1.2}]
    assert record["environment"] == {"python": "x"}


def test_a_record_grows_and_says_what_is_missing_until_nothing_is(tmp_path: Path) -> None:
    path, missing = tmp_path / "one.json", [{"arm": "plain", "fault": None}]
    file = RecordFile(path)
    assert "nothing was finished" in file.kept
    made = [make_record("demo", workload=TEST, arms=[], rows=[{"x": 1}] * num_rows, summary={}) for num_rows in (1, 2)]
    file.write(made[0], missing=missing)
    read = json.loads(path.read_text())
    assert (read["complete"], read["missing"], read["rows"]) == (False, missing, [{"x": 1}])
    assert file.kept == f"{path} has 1 row, 1 missing"
    file.write(made[1])
    assert json.loads(path.read_text()) == made[1]
    assert file.kept == f"{path} has 2 rows"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError):
        RecordFile(path).write(made[0], missing=missing)
    assert json.loads(path.read_text()) == made[1]


def test_a_write_that_breaks_leaves_the_record_before_it(tmp_path: Path) -> None:
    file, record = RecordFile(tmp_path / "one.json"), make_record("demo", workload=TEST, arms=[], rows=[], summary={})
    file.write(record)
    with pytest.raises(TypeError):
        file.write({**record, "rows": [object()]})
    assert json.loads((tmp_path / "one.json").read_text()) == record


def test_without_a_path_nothing_is_kept() -> None:
    file = RecordFile(None)
    file.write({})
    assert "--record FILE" in file.kept


def test_a_run_that_was_stopped_says_why_and_claims_nothing(tmp_path: Path) -> None:
    summary = {"speedup": 1.4, "verdict": "faster", "verdict_text": "faster by 40 %", "drafter_loses": True}
    record = make_record("compare", workload=TEST, arms=[], rows=[{"x": 1}], summary=summary)
    file = RecordFile(tmp_path / "one.json")
    file.write(record, missing=[{"arm": "a", "num_rows": 3}, {"arm": "b"}], stopped="SIGTERM")
    assert file.kept.endswith("has 1 row, 4 missing")
    kept = json.loads((tmp_path / "one.json").read_text())
    assert (kept["complete"], kept["stopped"]) == (False, "SIGTERM")
    text = "the run was stopped (SIGTERM), so nothing is claimed"
    assert kept["summary"] == {"speedup": 1.4, "verdict": "stopped", "verdict_text": text, "drafter_loses": False}
    file.write(record, stopped="no two prompts in common")  # all rows are there, and still it did not end well
    assert json.loads((tmp_path / "one.json").read_text())["complete"] is False
