"""Read one safetensors file strictly: every byte belongs to exactly one tensor. Tensors are mapped, not copied."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.file_head import json_object, read_head, size_error

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES = {
    "BOOL": torch.bool,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
"""As headers spell them."""


@dataclass(frozen=True)
class SafetensorsFile:
    """A checked header: `shapes` and `dtypes` of all tensors (as the header spells them), free-form `metadata`."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    metadata: dict[str, str]

    def tensor(self, name: str) -> Tensor:
        """One tensor, backed by the mapped file (copy on write), whatever its numbers are."""
        try:
            tensor: Tensor = self._mapped.get_tensor(name)
        except (SafetensorError, ValueError) as error:
            raise self._unsound(error) from error
        return tensor

    def tensors(self) -> dict[str, Tensor]:
        """All tensors; every number in them is finite."""
        tensors = {name: self.tensor(name) for name in self.shapes}
        for name, tensor in tensors.items():
            check_finite(name, tensor, path=self.path)
        return tensors

    @cached_property
    def _mapped(self) -> Any:
        """The library's view of the file, made once: parsing a large header for each tensor would take minutes."""
        try:
            return safe_open(self.path, framework="pt", device="cpu")
        except (SafetensorError, ValueError) as error:  # ValueError: a name that is no Unicode text
            raise self._unsound(error) from error

    def _unsound(self, error: Exception) -> WeightsError:
        return WeightsError(f"{self.path} is not a sound safetensors file: {error}. Download it again.")


def check_finite(name: str, tensor: Tensor, *, path: Path) -> None:
    """Refuse a tensor with a number that is NaN or infinite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    comparable = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    # Either extreme is NaN where any number is, at a thirtieth of the time that isfinite takes.
    if not all(math.isfinite(extreme) for extreme in comparable.aminmax()):
        raise WeightsError(f"{path}: tensor {name} has values that are not finite. Download it again.")


def check_safetensors(path: Path) -> SafetensorsFile:
    """Read and check a header; raises where header, offsets and file size do not agree exactly."""
    header_bytes, header = _read_header(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError(f"{path}: the header's __metadata__ is not an object of texts. Download it again.")
    spans: list[tuple[int, int, str]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, entry in header.items():
        dtypes[name], shapes[name], (start, stop) = _read_entry(path, name, entry)
        spans.append((start, stop, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            verdict = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise WeightsError(f"{path}: tensor {name} {verdict}: offset {start}, expected {end}.")
        end = stop
    expected_bytes, found_bytes = _LENGTH_BYTES + header_bytes + end, path.stat().st_size
    if expected_bytes != found_bytes:
        raise size_error(path, expected_bytes=expected_bytes, found_bytes=found_bytes)
    return SafetensorsFile(path, shapes, dtypes, metadata)


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    head = read_head(path, num_bytes=_LENGTH_BYTES)
    found_bytes = path.stat().st_size
    if len(head) < _LENGTH_BYTES:
        raise size_error(path, expected_bytes=_LENGTH_BYTES, found_bytes=found_bytes)
    (header_bytes,) = struct.unpack("<Q", head)
    if header_bytes > min(_MAX_HEADER_BYTES, found_bytes - _LENGTH_BYTES):
        raise WeightsError(
            f"{path} is cut off in its header or is not a safetensors file: expected at least "
            f"{_LENGTH_BYTES + header_bytes} bytes, found {found_bytes}. Download it again."
        )
    with path.open("rb") as file:
        file.seek(_LENGTH_BYTES)
        text = file.read(header_bytes)
    return header_bytes, json_object(text, what=f"the header of {path}")


def _read_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Dtype, shape and byte span of one header entry, once its own numbers agree."""
    try:
        dtype, shape = str(entry["dtype"]), _integers(entry["shape"])
        start, stop = _integers(entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: the header's entry for tensor {name} is incomplete: {entry!r}.") from error
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"{path}: tensor {name} has dtype {dtype}, which cannot be read.")
    num_bytes = DTYPES[dtype].itemsize
    for extent in shape:
        num_bytes *= extent
    if start < 0 or min(shape, default=0) < 0 or stop - start != num_bytes:
        raise WeightsError(
            f"{path}: tensor {name} of shape {list(shape)} and dtype {dtype} needs {num_bytes} bytes, "
            f"but its offsets [{start}, {stop}] give {stop - start}."
        )
    return dtype, shape, (start, stop)


def _integers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise TypeError(f"{value!r} is not a list of integers")
    return tuple(value)
