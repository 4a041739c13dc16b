"""The first look at a weight file."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import LocateError, WeightsError
from outrider.weights.file_head import json_object, read_head, size_error

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def test_returns_at_most_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"0123456789" * 5)
    assert read_head(path, num_bytes=4) == b"0123"
    path.write_bytes(b"01")
    assert read_head(path, num_bytes=4) == b"01"


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(LocateError, match="absent does not exist or is not a file"):
        read_head(tmp_path / "absent", num_bytes=4)
    with pytest.raises(LocateError, match="is not a file"):
        read_head(tmp_path, num_bytes=4)


@pytest.mark.parametrize(("data", "message"), [(b"", "data is empty"), (POINTER, r"git-lfs pointer of 64 bytes.*pull")])
def test_files_without_weights(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=message):
        read_head(path, num_bytes=4)


def test_size_error_tells_cut_from_padded() -> None:
    cut = size_error(Path("a.bin"), expected_bytes=10, found_bytes=9)
    assert str(cut) == "a.bin is cut off: expected 10 bytes, found 9. Download it again."
    assert "has 2 trailing bytes" in str(size_error(Path("a.bin"), expected_bytes=10, found_bytes=12))


def test_json_object() -> None:
    assert json_object(b'{"a": [1]}', what="x") == {"a": [1]}


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe{}", "[" * 100_000, '{"a":' * 100_000])
def test_text_that_is_no_json_is_named(text: str | bytes) -> None:
    with pytest.raises(WeightsError, match=r"the header of x is not JSON: .*Download it again"):
        json_object(text, what="the header of x")


@pytest.mark.parametrize("text", ["[]", "null", "1", '"x"'])
def test_json_that_is_no_object_is_named(text: str) -> None:
    with pytest.raises(WeightsError, match="x is not a JSON object"):
        json_object(text, what="x")


def test_a_repeated_key_is_named() -> None:
    with pytest.raises(WeightsError, match=r"the header of x has b\.weight twice"):
        json_object('{"a": {}, "b.weight": {"dtype": "F32"}, "b.weight": {}}', what="the header of x")
