"""The header reader agrees with the gguf package on sound files and refuses what does not add up."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from outrider.errors import LocateError, UnsupportedModelError, WeightsError
from outrider.weights.gguf_file import read_gguf


def write(path: Path, *, tensors: dict[str, np.ndarray]) -> Path:
    writer = GGUFWriter(path, "gemma3")
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_float32("test.half", 0.5)
    writer.add_bool("test.yes", True)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def two_tensors(tmp_path: Path) -> Path:
    return write(tmp_path / "two.gguf", tensors={"aa": np.ones(3, np.float32), "bb": np.ones((2, 5), np.float32)})


def edited(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def test_agrees_with_the_gguf_package(tiny_gguf: Path) -> None:
    ours, theirs = read_gguf(tiny_gguf), GGUFReader(tiny_gguf)
    assert {t.name for t in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.tensors[tensor.name].type is tensor.tensor_type
        assert ours.tensors[tensor.name].raw.tobytes() == tensor.data.tobytes()
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents()


def test_reads_scalars_and_arrays(two_tensors: Path) -> None:
    metadata = read_gguf(two_tensors).metadata
    assert (metadata["test.numbers"], metadata["test.half"], metadata["test.yes"]) == ([1, 2, 3], 0.5, True)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LocateError, match=r"absent\.gguf does not exist"):
        read_gguf(tmp_path / "absent.gguf")


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(WeightsError, match=r"other\.gguf is not a GGUF file"):
        read_gguf(path)


def test_unknown_version(two_tensors: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="GGUF version 9"):
        read_gguf(edited(two_tensors, b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack("<I", 9)))


def test_tensor_listed_twice(two_tensors: Path) -> None:
    with pytest.raises(WeightsError, match="tensor aa is listed twice"):
        read_gguf(edited(two_tensors, struct.pack("<Q", 2) + b"bb", struct.pack("<Q", 2) + b"aa"))


def test_unknown_tensor_type(two_tensors: Path) -> None:
    info = b"aa" + struct.pack("<IQI", 1, 3, 0)
    with pytest.raises(UnsupportedModelError, match="tensor aa has unknown type 999"):
        read_gguf(edited(two_tensors, info, b"aa" + struct.pack("<IQI", 1, 3, 999)))


@pytest.mark.parametrize("extent", [0, 31])
def test_shape_that_blocks_cannot_fill(two_tensors: Path, extent: int) -> None:
    info = b"aa" + struct.pack("<IQI", 1, 3, 0)
    with pytest.raises(WeightsError, match="tensor aa has shape"):
        read_gguf(edited(two_tensors, info, b"aa" + struct.pack("<IQI", 1, extent, 8)))


def test_gap_between_tensors(two_tensors: Path) -> None:
    info = b"bb" + struct.pack("<IQQIQ", 2, 5, 2, 0, 32)
    with pytest.raises(WeightsError, match="tensor bb is not where it has to be: offset 64, expected 32"):
        read_gguf(edited(two_tensors, info, b"bb" + struct.pack("<IQQIQ", 2, 5, 2, 0, 64)))


def test_text_that_is_not_utf8(two_tensors: Path) -> None:
    with pytest.raises(WeightsError, match="not UTF-8"):
        read_gguf(edited(two_tensors, b"test.half", b"\xffest.half"))


def test_absurd_array_length(two_tensors: Path) -> None:
    start = struct.pack("<I", 5)
    with pytest.raises(WeightsError, match=r"array elements expected at least \d+ bytes, found \d+"):
        read_gguf(edited(two_tensors, start + struct.pack("<Q", 3), start + struct.pack("<Q", 10**15)))


def test_unknown_value_type(two_tensors: Path) -> None:
    with pytest.raises(WeightsError, match="unknown type 77"):
        read_gguf(edited(two_tensors, b"test.half" + struct.pack("<I", 6), b"test.half" + struct.pack("<I", 77)))


def test_every_prefix_is_refused(two_tensors: Path) -> None:
    data = two_tensors.read_bytes()
    last = read_gguf(two_tensors).tensors["bb"].raw.nbytes
    end = data.rindex(np.ones(10, np.float32).tobytes()) + last
    two_tensors.write_bytes(data[:end])
    assert len(read_gguf(two_tensors).tensors) == 2
    for num_bytes in range(end):
        two_tensors.write_bytes(data[:num_bytes])
        with pytest.raises(WeightsError, match=r"two\.gguf"):
            read_gguf(two_tensors)
