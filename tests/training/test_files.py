from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import pytest

from outrider.errors import ConfigError
from outrider.training.files import write_whole


def test_a_file_that_cannot_be_finished_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "data"

    def full(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    write_whole(path, lambda file: file.write(b"whole"), what="text")
    with pytest.raises(ConfigError, match=r"text .*data could not be written.*No space left.*make room"):
        write_whole(path, full, what="text")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("data", b"whole")]
