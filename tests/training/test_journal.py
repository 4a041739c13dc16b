from __future__ import annotations

import resource
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.training.journal import Journal

HEADER = {"schema": 1, "target_sha256": "abc"}


def begun(path: Path) -> None:
    journal = Journal(path, HEADER)
    for key in ("a", "b"):
        journal.append({"key": key, "answers": [key]})
    journal.close()


def test_a_line_that_was_cut_off_is_taken_off_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begun(path)
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, whole.rindex(b"\n", 0, -1), -1):
        path.write_bytes(whole[:cut])
        journal = Journal(path, HEADER)
        assert list(journal.records) == ["a"]
        journal.append({"key": "b", "answers": ["b"]})
        journal.close()
        assert path.read_bytes() == whole
    path.write_bytes(whole[:5])  # not even the header is whole
    begun(path)
    assert path.read_bytes() == whole


def test_a_journal_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begun(path)
    whole = path.read_bytes()
    with pytest.raises(ConfigError, match=r"begun with another target_sha256 .*abc there, def here"):
        Journal(path, {**HEADER, "target_sha256": "def"})
    path.write_bytes(whole.replace(b'"key": "a"', b'"ke'))
    with pytest.raises(ConfigError, match="line 2, is damaged"):
        Journal(path, HEADER)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Journal(tmp_path / "none" / "journal", HEADER)


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begun(path)
    journal = Journal(path, HEADER)
    journal.append({"key": "c"})
    whole = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (7, 0):  # half a line fits, or nothing
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + room, hard))
            with pytest.raises(ConfigError, match=r"cannot grow .*3 conversations are kept: make room"):
                journal.append({"key": "d"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == whole
    assert list(journal.records) == ["a", "b", "c"]
    journal.append({"key": "d"})
    journal.close()
    assert path.read_bytes() == whole + b'{"key": "d"}\n'
