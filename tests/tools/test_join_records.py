"""One record of several. Seen red: a later record's rows with the first one's arms, summaries overwritten."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.benchmarking.report.records import read_record
from outrider.errors import ConfigError
from tests.benchmarking.test_decode import PEER, ours, table
from tools import join_records


def test_parts_of_a_table_become_one_that_the_report_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [table([ours(250.0), ours(375.0)], PEER).record(), table([ours(100.0)]).record()]
    parts[1]["environment"] = {**parts[0]["environment"], "gpu": "another"}
    paths = [tmp_path / f"{number}.json" for number in range(2)]
    for path, part in zip(paths, parts, strict=True):
        path.write_text(json.dumps(part))
    out = tmp_path / "joined.json"
    monkeypatch.setattr(sys, "argv", ["join_records.py", *map(str, paths), "--out", str(out)])
    join_records.main()
    joined = json.loads(out.read_text())
    assert [row["tokens_per_s"] for row in joined["summary"]] == [312.5, 100.0]
    names = [arm["name"] for arm in joined["arms"]]
    assert names == ["outrider", "vllm", "outrider, again", "outrider (2)"]
    assert [row["arm"] for row in joined["rows"]] == ["outrider", "outrider, again", "vllm", "outrider (2)"]
    assert joined["arms"][-1]["environment"]["gpu"] == "another"
    assert len(read_record(out).summaries) == 2
    with pytest.raises(SystemExit, match="exists"):
        join_records.main()


def test_what_is_no_part_of_one_table_is_refused() -> None:
    record = table([ours(100.0)]).record()
    with pytest.raises(ConfigError, match="two or more"):
        join_records.join_records([record])
    with pytest.raises(ConfigError, match="differ in workload"):
        join_records.join_records([record, {**record, "workload": {"name": "other"}}])


def test_what_is_missing_of_a_part_is_missing_of_the_whole() -> None:
    record = table([ours(100.0)]).record()
    part = {**record, "complete": False, "missing": [{"arm": "outrider", "fault": None}, {"arm": "vllm", "fault": "x"}]}
    joined = join_records.join_records([record, part])
    assert joined["complete"] is False
    assert [each["arm"] for each in joined["missing"]] == ["outrider (2)", "vllm (2)"]
    assert "complete" not in join_records.join_records([record, record])
    stopped = join_records.join_records([record, {**part, "stopped": "SIGTERM"}])
    assert (stopped["complete"], stopped["stopped"]) == (False, "SIGTERM")
