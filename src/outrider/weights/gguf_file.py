"""Read and check a GGUF header: metadata, and which bytes belong to which tensor. Nothing is decoded here.

The `gguf` package's own reader makes an array of every string, which takes half a minute for a vocabulary of 262,144,
and it accepts files whose tensors overlap or that carry trailing bytes. So the header is read here; the type tables
are the package's.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.file_head import read_head, size_error

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MIN_METADATA_BYTES = 13  # key length, empty key, type, one byte of value
_MIN_TENSOR_BYTES = 24  # name length, empty name, no dimensions, type, offset


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as stored: `shape` is (out, in) or (n,), `raw` its bytes, uint8 [num_bytes], mapped from the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """A checked GGUF file: every byte is accounted for."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF header and map its tensors; raises where header, offsets and file size do not agree exactly."""
    head = read_head(path, num_bytes=8)
    if head[:4] != MAGIC:
        raise WeightsError(f"{path} is not a GGUF file: it starts with {head[:4]!r}, expected {MAGIC!r}.")
    cursor = _Cursor(path)
    cursor.take(4)
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise UnsupportedModelError(f"{path} is GGUF version {version} (or big-endian); versions 2 and 3 are read.")
    num_tensors = cursor.count("tensors", min_bytes=_MIN_TENSOR_BYTES)
    num_metadata = cursor.count("metadata entries", min_bytes=_MIN_METADATA_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise WeightsError(f"{path} declares general.alignment={alignment!r}, which is not a power of two.")
    return GgufFile(path, metadata, _place(cursor, infos, alignment=alignment))


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Cursor:
    """A position in the mapped file; a read past its end is an error that names the file and both sizes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self.buffer)
        self.position = 0

    def need(self, num_bytes: int) -> None:
        if num_bytes > self.size - self.position:
            raise WeightsError(
                f"{self.path} is cut off or corrupt in its header: expected at least {self.position + num_bytes} "
                f"bytes, found {self.size}. Download it again."
            )

    def take(self, num_bytes: int) -> bytes:
        self.need(num_bytes)
        start, self.position = self.position, self.position + num_bytes
        return self.buffer[start : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str, *, min_bytes: int) -> int:
        """A count of things that each take at least `min_bytes`; refused before anything is allocated for it."""
        count = int(self.number("Q"))
        if count * min_bytes > self.size - self.position:
            raise WeightsError(
                f"{self.path} is cut off or corrupt in its header: for {count} {what} expected at least "
                f"{self.position + count * min_bytes} bytes, found {self.size}. Download it again."
            )
        return count

    def string(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path} has a string in its header that is not UTF-8: {data[:40]!r}.") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise WeightsError(f"{self.path} has metadata of unknown type {kind} in its header; it is corrupt.")

    def array(self) -> Any:
        kind = self.number("I")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            count = self.count("array elements", min_bytes=struct.calcsize("<" + code))
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        if kind == _STRING:
            return [self.string() for _ in range(self.count("strings", min_bytes=8))]
        raise WeightsError(f"{self.path} has an array of unknown type {kind} in its header; it is corrupt.")


def _read_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string()
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise WeightsError(f"{cursor.path}: tensor {name} has {num_dimensions} dimensions; the header is corrupt.")
    # GGUF lists the fastest dimension first; everywhere else the slowest comes first.
    shape = tuple(reversed([int(cursor.number("Q")) for _ in range(num_dimensions)]))
    type_id, offset = cursor.number("I"), cursor.number("Q")
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError as error:
        raise UnsupportedModelError(f"{cursor.path}: tensor {name} has unknown type {type_id}.") from error
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    num_elements = 1
    for extent in shape:
        num_elements *= extent
    if num_elements == 0 or shape[-1] % block_size:
        raise WeightsError(
            f"{cursor.path}: tensor {name} has shape {shape}, which {kind.name} blocks of {block_size} cannot fill."
        )
    return _TensorInfo(name, kind, shape, offset, num_elements // block_size * block_bytes)


def _place(cursor: _Cursor, infos: list[_TensorInfo], *, alignment: int) -> dict[str, GgufTensor]:
    """Give each tensor its bytes. They must follow one another, padded to `alignment`, up to the end of the file."""
    path = cursor.path
    data_start = _padded(cursor.position, alignment)
    end = 0
    for info in sorted(infos, key=lambda info: info.offset):
        expected = _padded(end, alignment)
        if info.offset != expected:
            verdict = "overlaps the tensor before it" if info.offset < end else "is not where it has to be"
            raise WeightsError(f"{path}: tensor {info.name} {verdict}: offset {info.offset}, expected {expected}.")
        end = info.offset + info.num_bytes
    if cursor.size not in (data_start + end, data_start + _padded(end, alignment)):
        raise size_error(path, expected_bytes=data_start + end, found_bytes=cursor.size)
    data = np.frombuffer(cursor.buffer, dtype=np.uint8)
    tensors: dict[str, GgufTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise WeightsError(f"{path}: tensor {info.name} is listed twice.")
        start = data_start + info.offset
        tensors[info.name] = GgufTensor(info.name, info.type, info.shape, data[start : start + info.num_bytes])
    return tensors


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
