from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.benchmarking.report.records import find_records, read_record
from outrider.errors import ConfigError
from tests.benchmarking.report import made


def test_a_record_is_read(tmp_path: Path) -> None:
    (path,) = made.write(tmp_path, one=made.run())
    record = read_record(path)
    assert (record.stem, record.is_published, len(record.summaries)) == ("one", False, 1)
    (path,) = made.write(tmp_path, table=made.sweep() | {"published": True})
    assert (read_record(path).is_published, len(read_record(path).summaries)) == (True, 24)


@pytest.mark.parametrize("key", ["schema", "name", "environment", "workload", "arms", "rows", "summary"])
def test_what_is_missing_is_named(tmp_path: Path, key: str) -> None:
    fields = made.run()
    del fields[key]
    (path,) = made.write(tmp_path, broken=fields)
    with pytest.raises(ConfigError, match=rf"broken\.json is no record: its '?{key}") as raised:
        read_record(path)
    assert "--record" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema is 2"),
        ({"summary": "fast"}, "'summary'"),
        ({"summary": [1]}, "'summary' holds"),
        ({"rows": [[]]}, "'rows' holds"),
        ({"arms": ["plain"]}, "'arms' holds"),
        ({"workload": {}}, "workload has no name"),
    ],
)
def test_another_shape_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (path,) = made.write(tmp_path, odd=made.run() | change)
    with pytest.raises(ConfigError, match=rf"odd\.json.*{said}"):
        read_record(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '"schema"'])
def test_what_is_no_object_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "torn.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"torn\.json"):
        read_record(path)


def test_bytes_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bytes.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"bytes\.json"):
        read_record(path)


def test_files_and_folders_are_found_once_each(tmp_path: Path) -> None:
    b, a = made.write(tmp_path, b=made.run(), a=made.run())
    (tmp_path / "note.txt").write_text("no record")
    assert find_records([b, tmp_path]) == [b, a]
    with pytest.raises(ConfigError, match=r"gone\.json is not there"):
        find_records([tmp_path / "gone.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty holds no"):
        find_records([tmp_path / "empty"])


def test_a_torn_copy_of_a_record_is_refused(tmp_path: Path) -> None:
    text = json.dumps(made.compare())
    path = tmp_path / "half.json"
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match=r"half\.json cannot be read"):
        read_record(path)
