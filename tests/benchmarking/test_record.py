from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.benchmarking.record import make_record, write_record
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
