"""T-053: cut-off, padded or incomplete weight files are refused with one clear error on every load path."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import save_file

from outrider.errors import LocateError, WeightsError
from outrider.weights.gguf_file import read_gguf
from outrider.weights.loader import load_checkpoint
from outrider.weights.safetensors_dir import INDEX_NAME, load_safetensors_dir
from tests.weights.tiny_gguf import write_tiny_gguf

SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
MAX_PEAK_BYTES = 50_000_000
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 253113024\n"
SIZES = r"expected( at least)? \d+ bytes, found \d+"

Damage = Callable[[bytes], bytes]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def two_floats_gguf(path: Path) -> Path:
    """Tensor a of two floats, and b after it so that something can overlap."""
    writer = GGUFWriter(path, "gemma3")
    for name in ("a", "b"):
        writer.add_tensor(name, np.ones(2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def two_floats_directory(path: Path) -> Path:
    """The same as a directory of safetensors files."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, path / "model.safetensors")
    return path


def gguf_data_end(data: bytes, *, folder: Path) -> int:
    """Where the last tensor's bytes end: before the padding that GGUF writers add."""
    path = folder / "measured"
    path.write_bytes(data)
    return max(tensor.data_offset + tensor.n_bytes for tensor in GGUFReader(path).tensors)


def refused(load: Callable[[], object], *, file: str, message: str) -> None:
    """The load raises WeightsError that names the file and matches, and allocates next to nothing."""
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=message) as caught:
            load()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert file in str(caught.value)
    assert peak_bytes < MAX_PEAK_BYTES


GGUF_DAMAGE: dict[str, tuple[Damage, str]] = {
    "header cut": (lambda data: data[:40], SIZES),
    "magic cut": (lambda data: data[:3], "is not a GGUF file"),
    "absurd tensor count": (lambda data: data[:8] + struct.pack("<Q", 10**15) + data[16:], SIZES),
    "absurd metadata count": (lambda data: data[:16] + struct.pack("<Q", 10**15) + data[24:], SIZES),
    "absurd string length": (lambda data: data[:24] + struct.pack("<Q", 10**15) + data[32:], SIZES),
    "trailing bytes": (lambda data: data + b"\0\0\0\0", "has .* trailing bytes.*" + SIZES),
    "overlapping offsets": (
        lambda data: data.replace(b"b" + struct.pack("<IQIQ", 1, 2, 0, 32), b"b" + struct.pack("<IQIQ", 1, 2, 0, 4)),
        "tensor b overlaps the tensor before it: offset 4, expected 32",
    ),
    "git-lfs pointer": (lambda data: POINTER, "git-lfs pointer"),
    "empty file": (lambda data: b"", "is empty"),
}


@pytest.mark.parametrize("name", GGUF_DAMAGE)
def test_t053_gguf(tmp_path: Path, name: str) -> None:
    damage, message = GGUF_DAMAGE[name]
    path = two_floats_gguf(tmp_path / "bad.gguf")
    whole = path.read_bytes()
    assert read_gguf(path).tensors.keys() == {"a", "b"}
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    refused(lambda: read_gguf(path), file="bad.gguf", message=message)
    refused(lambda: load_checkpoint(path), file="bad.gguf", message=message)


def test_t053_gguf_data_cut_by_one_byte(tmp_path: Path) -> None:
    path = two_floats_gguf(tmp_path / "bad.gguf")
    whole = path.read_bytes()
    end = gguf_data_end(whole, folder=tmp_path)
    path.write_bytes(whole[:end])
    assert read_gguf(path).tensors.keys() == {"a", "b"}  # only padding is gone
    path.write_bytes(whole[: end - 1])
    message = f"is cut off: expected {end} bytes, found {end - 1}"
    refused(lambda: read_gguf(path), file="bad.gguf", message=message)
    refused(lambda: load_checkpoint(path), file="bad.gguf", message=message)


def test_t053_good_gguf_beside_a_bad_one_loads(tmp_path: Path) -> None:
    good = write_tiny_gguf(tmp_path / "good.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(good.read_bytes()[:-64])
    refused(lambda: load_checkpoint(bad), file="bad.gguf", message=SIZES)
    assert load_checkpoint(good).tensors["model.norm.weight"].shape == (256,)


SAFETENSORS_DAMAGE: dict[str, tuple[Damage, str]] = {
    "header cut": (lambda data: data[:20], SIZES),
    "length cut": (lambda data: data[:5], SIZES),
    "absurd header length": (lambda data: struct.pack("<Q", 10**15) + data[8:], SIZES),
    "data cut by 1 byte": (lambda data: data[:-1], "is cut off: " + SIZES),
    "trailing bytes": (lambda data: data + b"\0\0\0\0", "has 4 trailing bytes.*" + SIZES),
    "overlapping offsets": (lambda data: data.replace(b"[8,16]", b"[4,12]"), "tensor b overlaps the tensor before it"),
    "git-lfs pointer": (lambda data: POINTER, "git-lfs pointer"),
    "empty file": (lambda data: b"", "is empty"),
}


@pytest.mark.parametrize("name", SAFETENSORS_DAMAGE)
def test_t053_safetensors(tmp_path: Path, name: str) -> None:
    damage, message = SAFETENSORS_DAMAGE[name]
    good, bad = two_floats_directory(tmp_path / "good"), two_floats_directory(tmp_path / "bad")
    file = bad / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    refused(lambda: load_safetensors_dir(bad), file=str(file), message=message)
    refused(lambda: load_checkpoint(bad), file=str(file), message=message)
    assert load_checkpoint(good).tensors.keys() == {"a", "b"}


def test_t053_absent_shard(tmp_path: Path) -> None:
    path = two_floats_directory(tmp_path / "model")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    refused(lambda: load_checkpoint(path), file="model-00002-of-00002.safetensors", message="which .* lacks")


def sharded_directory(path: Path) -> Path:
    """Tensor a in one shard, b in another."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    for name, file_name in SHARDS.items():
        save_file({name: torch.ones(2)}, path / file_name)
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": SHARDS}))
    return path


@pytest.mark.parametrize("file_name", SHARDS.values())
@pytest.mark.parametrize("name", SAFETENSORS_DAMAGE)
def test_t053_damaged_shard(tmp_path: Path, name: str, file_name: str) -> None:
    damage, message = SAFETENSORS_DAMAGE[name]
    good, bad = sharded_directory(tmp_path / "good"), sharded_directory(tmp_path / "bad")
    if name == "overlapping offsets":
        for path in (good, bad):
            save_file({f"{file_name}.{each}": torch.ones(2) for each in "ab"}, path / file_name)
            other = {each: shard for each, shard in SHARDS.items() if shard != file_name}
            listed = {**other, **{f"{file_name}.{each}": file_name for each in "ab"}}
            (path / INDEX_NAME).write_text(json.dumps({"weight_map": listed}))
        message = r"tensor \S+\.b overlaps the tensor before it"
    file = bad / file_name
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    refused(lambda: load_safetensors_dir(bad), file=str(file), message=message)
    refused(lambda: load_checkpoint(bad), file=str(file), message=message)
    assert len(load_checkpoint(good).tensors) >= 2


def test_t053_shards_that_are_swapped(tmp_path: Path) -> None:
    path = sharded_directory(tmp_path / "model")
    first, second = (path / file_name for file_name in SHARDS.values())
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    refused(lambda: load_checkpoint(path), file=first.name, message="tensor [ab]: .*(lacks it|does not list it)")


def test_t053_absent_file(tmp_path: Path) -> None:
    with pytest.raises(LocateError, match=r"absent\.gguf does not exist"):
        load_checkpoint(tmp_path / "absent.gguf")
