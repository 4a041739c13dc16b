"""Preparing a GGUF file once, and using what was prepared only while it is whole."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, WeightsError
from outrider.tokenizer import Tokenizer
from outrider.weights import prepared
from outrider.weights.gguf import gguf_config, gguf_tensors, open_gemma_gguf
from outrider.weights.gguf_file import GgufFile
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight
from outrider.weights.prepared import Prepared, load_prepared
from tests.weights.tiny_gguf import TOKENS

SHA256 = "ab" * 32


def load(path: Path, messages: list[str] | None = None) -> Prepared:
    return load_prepared(path, sha256=SHA256, progress=([] if messages is None else messages).append)


def prepared_directory(cache: Path) -> Path:
    (directory,) = (cache / "prepared").iterdir()
    return directory


def test_holds_what_the_file_holds(cache: Path, tiny_gguf: Path) -> None:
    file = open_gemma_gguf(tiny_gguf)
    expected = gguf_tensors(file)
    loaded = load(tiny_gguf)
    assert loaded.config == gguf_config(file)
    assert loaded.norm_offset == 0.0
    assert loaded.tensors.keys() == expected.keys()
    for name, weight in expected.items():
        found = loaded.tensors[name]
        if isinstance(weight, DenseWeight):
            assert isinstance(found, DenseWeight)
            assert torch.equal(found.values, weight.values)
            continue
        assert isinstance(found, BlockInt8Weight)
        assert found.group_size == weight.group_size
        assert torch.equal(found.values, weight.values)
        assert torch.equal(found.scales, weight.scales)
        assert (found.offsets is None) == (weight.offsets is None)
        assert weight.offsets is None or torch.equal(found.offsets, weight.offsets)
    assert Tokenizer.from_file(loaded.tokenizer_path).vocab_size == len(TOKENS)


def test_prepares_once(cache: Path, tiny_gguf: Path) -> None:
    messages: list[str] = []
    load(tiny_gguf, messages)
    changed = (prepared_directory(cache) / "model.safetensors").stat().st_mtime_ns
    load(tiny_gguf, messages)
    assert messages == ["Preparing tiny.gguf (once)"]
    assert (prepared_directory(cache) / "model.safetensors").stat().st_mtime_ns == changed


def cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def drop_facts(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"outrider"', b'"outrIder"'))


def break_a_name(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(
        path.read_bytes().replace(b"model.embed_tokens.weight.scales", b"model.embed_tokens.weight.scalEs")
    )


def set_facts(directory: Path, **changes: Any) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["outrider"])
    save_file(tensors, path, metadata={"outrider": json.dumps({**facts, **changes})})


def facts_in_a_list(directory: Path) -> None:
    save_file(load_file(directory / "model.safetensors"), directory / "model.safetensors", metadata={"outrider": "[]"})


def null_metadata(directory: Path) -> None:
    path = directory / "model.safetensors"
    header = json.dumps({"__metadata__": None}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def group_sizes_in_a_list(directory: Path) -> None:
    set_facts(directory, group_sizes=["model.embed_tokens.weight"])


def group_size_zero(directory: Path) -> None:
    set_facts(directory, group_sizes={"model.embed_tokens.weight": 0})


def config_in_a_list(directory: Path) -> None:
    set_facts(directory, config=[])


def unknown_dtype(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F3:"', 1))


def norm_not_finite(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = float("nan")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata)


def change_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_bytes(b"x" * path.stat().st_size)


def cut_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-1])


def remove_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def remove_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        cut_weights,
        drop_facts,
        break_a_name,
        facts_in_a_list,
        null_metadata,
        group_sizes_in_a_list,
        group_size_zero,
        config_in_a_list,
        unknown_dtype,
        norm_not_finite,
        change_tokenizer,
        cut_tokenizer,
        remove_tokenizer,
        remove_weights,
    ],
)
def test_damaged_preparation_is_made_again(cache: Path, tiny_gguf: Path, damage: Callable[[Path], None]) -> None:
    load(tiny_gguf)
    directory = prepared_directory(cache)
    whole = {path.name: path.read_bytes() for path in directory.iterdir()}
    damage(directory)
    messages: list[str] = []
    load(tiny_gguf, messages)
    assert "are damaged" in messages[0]
    assert messages[1:] == ["Preparing tiny.gguf (once)"]
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == whole


def test_interrupted_preparation_is_never_used(cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load(tiny_gguf)
    assert list((cache / "prepared").iterdir()) == []
    assert load(tiny_gguf).config["hidden_size"] == 256


def test_what_killed_processes_left_is_removed_after_an_hour(cache: Path, tiny_gguf: Path) -> None:
    old, fresh = (cache / "prepared" / f"x.{name}.unfinished" for name in ("1", "2"))
    for path in (old, fresh):
        path.mkdir(parents=True)
    os.utime(old, (0.0, time.time() - 4000))
    load(tiny_gguf)
    assert not old.exists()
    assert fresh.exists()


def test_another_process_may_finish_first(cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(tiny_gguf)
    directory = prepared_directory(cache)
    loser = cache / "loser"
    loser.mkdir()
    prepared._publish(loser, directory)
    assert load(tiny_gguf).config["hidden_size"] == 256
    with pytest.raises(OSError, match="absent"):
        prepared._publish(cache / "absent", cache / "nowhere" / "x")


def test_bad_file_leaves_no_preparation(cache: Path, tiny_gguf: Path) -> None:
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"tiny\.gguf is cut off"):
        load(tiny_gguf)
    assert list(cache.glob("prepared/*")) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_cache_is_named_and_left_clean(
    cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(prepared, "save_file", no_room)
    with pytest.raises(ConfigError, match=r"Cannot use the cache .*prepared.*No space left.*Set OUTRIDER_CACHE"):
        load(tiny_gguf)
    assert list((cache / "prepared").iterdir()) == []


def test_a_cache_that_is_a_file_is_named(cache: Path, tiny_gguf: Path) -> None:
    cache.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"Cannot use the cache .*Set OUTRIDER_CACHE"):
        load(tiny_gguf)


def test_what_another_process_renames_meanwhile_is_passed_over(cache: Path, tiny_gguf: Path) -> None:
    (cache / "prepared").mkdir(parents=True)
    (cache / "prepared" / "x.1.unfinished").symlink_to(cache / "gone")
    assert load(tiny_gguf).config["hidden_size"] == 256


def test_a_norm_of_the_file_that_is_not_finite(cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tensors_with_nan(file: GgufFile) -> dict[str, PackedWeight]:
        weights = gguf_tensors(file)
        weights["model.norm.weight"] = DenseWeight("model.norm.weight", torch.tensor([1.0, float("nan")]))
        return weights

    monkeypatch.setattr(prepared, "gguf_tensors", tensors_with_nan)
    with pytest.raises(WeightsError, match=r"tiny\.gguf: tensor model\.norm\.weight has values that are not finite"):
        load(tiny_gguf)
    assert not list(cache.glob("prepared/*"))
