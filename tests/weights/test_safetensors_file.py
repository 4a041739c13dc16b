"""Headers of safetensors files: read strictly, tensors mapped."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import OutriderError, UnsupportedModelError, WeightsError
from outrider.weights.safetensors_file import check_safetensors


def write(path: Path, header: Any, *, num_data_bytes: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_data_bytes))
    return path


def entry(start: int, stop: int, *, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {
        "f": torch.arange(6.0).view(2, 3),
        "h": torch.ones(3, dtype=torch.bfloat16),
        "i": torch.tensor([[-5, 7]], dtype=torch.int8),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"key": "value"})
    file = check_safetensors(tmp_path / "a.safetensors")
    assert file.metadata == {"key": "value"}
    found = file.tensors()
    assert found.keys() == tensors.keys() == file.shapes.keys()
    for name, tensor in tensors.items():
        assert file.shapes[name] == tuple(tensor.shape)
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


ENTRY = entry(0, 8)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "header of .* is not JSON"),
        (b"\xff\xfe{}", "header of .* is not JSON"),
        (b"[" * 50_000, "header of .* is not JSON"),
        (["a"], "not a JSON object"),
        ({"__metadata__": None, "a": ENTRY}, "header's __metadata__ is not an object of texts"),
        ({"__metadata__": ["x"], "a": ENTRY}, "header's __metadata__ is not an object of texts"),
        ({"__metadata__": {"x": 1}, "a": ENTRY}, "header's __metadata__ is not an object of texts"),
        ({"a": {**ENTRY, "data_offsets": [0, float("inf")]}}, "entry for tensor a is incomplete"),
        ({"a": {**ENTRY, "data_offsets": [0, 8, 8]}}, "entry for tensor a is incomplete"),
        ({"a": {**ENTRY, "data_offsets": "08"}}, "entry for tensor a is incomplete"),
        ({"a": {**ENTRY, "shape": [float("nan")]}}, "entry for tensor a is incomplete"),
        ({"a": {**ENTRY, "shape": [2.0]}}, "entry for tensor a is incomplete"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, "entry for tensor a is incomplete"),
        ({"a": {**ENTRY, "shape": "2"}}, "entry for tensor a is incomplete"),
        ({"a": {**ENTRY, "shape": None}}, "entry for tensor a is incomplete"),
        ({"a": {"dtype": "F32"}}, "entry for tensor a is incomplete"),
        ({"a": "F32"}, "entry for tensor a is incomplete"),
        ({"a": entry(0, 7)}, r"tensor a of shape \[2\] and dtype F32 needs 8 bytes, but its offsets \[0, 7\] give 7"),
        ({"a": entry(-8, 0)}, "tensor a of shape"),
        ({"a": entry(0, 8, shape=(-1, -2))}, "tensor a of shape"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, "tensor b overlaps the tensor before it: offset 4, expected 8"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, "tensor b leaves a gap before it: offset 12, expected 8"),
    ],
)
def test_headers_that_do_not_add_up(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "bad.safetensors", header, num_data_bytes=8)
    with pytest.raises(WeightsError, match=message) as caught:
        check_safetensors(path)
    assert str(path) in str(caught.value)


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.safetensors", {"a": entry(0, 8, dtype="F4")}, num_data_bytes=8)
    with pytest.raises(UnsupportedModelError, match="tensor a has dtype F4"):
        check_safetensors(path)


@pytest.mark.parametrize(("num_data_bytes", "verdict"), [(7, "is cut off"), (12, "has 4 trailing bytes")])
def test_size_of_the_file(tmp_path: Path, num_data_bytes: int, verdict: str) -> None:
    path = write(tmp_path / "size.safetensors", {"a": entry(0, 8)}, num_data_bytes=num_data_bytes)
    with pytest.raises(WeightsError, match=verdict):
        check_safetensors(path)


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "two.safetensors", {"a": entry(0, 8), "b": entry(8, 16)}, num_data_bytes=16)
    data = path.read_bytes()
    assert check_safetensors(path).shapes == {"a": (2,), "b": (2,)}
    for num_bytes in range(len(data)):
        path.write_bytes(data[:num_bytes])
        with pytest.raises(WeightsError, match=r"two\.safetensors"):
            check_safetensors(path)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {**ENTRY, "shape": [0, 2**70], "data_offsets": [0, 0]}, "b": ENTRY},
        {"\ud800": ENTRY},
        json.dumps({"a": ENTRY}).encode("utf-16"),
        b"\xef\xbb\xbf" + json.dumps({"a": ENTRY}).encode(),
    ],
)
def test_what_only_the_library_refuses_is_named(tmp_path: Path, header: Any) -> None:
    path = write(tmp_path / "odd.safetensors", header, num_data_bytes=8)
    with pytest.raises(WeightsError, match=r"odd\.safetensors is not a sound safetensors file"):
        check_safetensors(path).tensors()


def test_changed_bytes_of_a_header_never_escape(tmp_path: Path) -> None:
    path = write(tmp_path / "flip.safetensors", {"__metadata__": {"k": "v"}, "a": ENTRY}, num_data_bytes=8)
    data = path.read_bytes()
    for index in range(len(data) - 8):
        for byte in b'\x00\xff0[]{},:"e':
            path.write_bytes(data[:index] + bytes([byte]) + data[index + 1 :])
            with suppress(OutriderError):
                check_safetensors(path).tensors()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_named(tmp_path: Path, dtype: torch.dtype, bad: float) -> None:
    path, values = tmp_path / "a.safetensors", torch.ones(3, 5)
    save_file({"fine": values.to(dtype)}, path)
    check_safetensors(path).tensors()
    values[1, 3] = bad
    save_file({"fine": torch.ones(2), "n.weight": values.to(dtype)}, path)
    with pytest.raises(WeightsError, match=r"a\.safetensors: tensor n\.weight has values that are not finite"):
        check_safetensors(path).tensors()
