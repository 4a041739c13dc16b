from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import pytest
from safetensors import SafetensorError

from outrider.errors import ConfigError
from outrider.training.files import write_folder, write_whole


def test_a_file_that_cannot_be_finished_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "data"

    def full(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    write_whole(path, lambda file: file.write(b"whole"), what="text")
    with pytest.raises(ConfigError, match=r"text .*data could not be written.*No space left.*make room"):
        write_whole(path, full, what="text")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("data", b"whole")]


def test_a_folder_that_cannot_be_finished_leaves_nothing_and_the_one_before(tmp_path: Path) -> None:
    def whole(folder: Path) -> None:
        (folder / "a").write_text("new")

    def full(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise SafetensorError("No space left on device")

    with pytest.raises(ConfigError, match=r"drafter .*out could not be written.*No space left"):
        write_folder(tmp_path / "out", full, what="drafter")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("old")
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(ConfigError):
        write_folder(tmp_path / "out", full, what="drafter")
    assert (tmp_path / "out" / "a").read_text() == "old"
    write_folder(tmp_path / "out", whole, what="drafter")
    assert {file.name: file.read_text() for file in (tmp_path / "out").iterdir()} == {"a": "new", "mine": "kept"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    write_folder(tmp_path / "fresh" / "out", whole, what="drafter")
    assert (tmp_path / "fresh" / "out" / "a").read_text() == "new"
