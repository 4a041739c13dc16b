"""The prepared form of a GGUF file: unpacked once into the cache, mapped into memory ever after.

A directory `prepared/<sha256>-v<version>` holds `model.safetensors` and `tokenizer.json`. It is filled under another
name and renamed when it is whole, so an interrupted preparation is never used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import OutriderError, WeightsError
from outrider.weights.file_head import json_object
from outrider.weights.gguf import NORM_OFFSET, gguf_config, gguf_tensors, open_gemma_gguf
from outrider.weights.gguf_tokenizer import tokenizer_json
from outrider.weights.locate import cache_dir, cache_folder
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight
from outrider.weights.safetensors_file import check_finite, check_safetensors

PREPARED_VERSION = 3  # raise it whenever what is written here changes
_WEIGHTS_NAME, _TOKENIZER_NAME = "model.safetensors", "tokenizer.json"
_UNFINISHED = ".unfinished"
_ABANDONED_AFTER_S = 3600.0
_FACTS = {"config": dict, "group_sizes": dict, "norm_offset": float, "source_sha256": str, "tokenizer_sha256": str}


@dataclass(frozen=True)
class Prepared:
    """What a prepared directory holds."""

    config: dict[str, Any]
    tensors: dict[str, PackedWeight]
    norm_offset: float
    tokenizer_path: Path
    source_sha256: str


def is_prepared(directory: Path) -> bool:
    """True for a directory that a preparation made; it can be copied to another machine and loaded there as it is."""
    return (directory / _WEIGHTS_NAME).is_file() and not (directory / "config.json").exists()


def load_prepared(path: Path, *, sha256: str, progress: Callable[[str], None]) -> Prepared:
    """Load the prepared form of the GGUF file at `path`, making it first where it is missing or damaged."""
    directory = cache_dir() / "prepared" / f"{sha256[:32]}-v{PREPARED_VERSION}"
    if directory.is_dir():
        try:
            return read_prepared(directory)
        except OutriderError as error:
            progress(f"The prepared weights in {directory} are damaged ({error}). Making them again.")
            shutil.rmtree(directory, ignore_errors=True)
    _prepare(path, directory, sha256=sha256, progress=progress)
    return read_prepared(directory)


def read_prepared(directory: Path) -> Prepared:
    """Load a prepared directory; WeightsError if it is damaged or something else."""
    file = check_safetensors(directory / _WEIGHTS_NAME)
    facts = json_object(file.metadata.get("outrider", "{}"), what=f"the metadata of {file.path}")
    wrong = [key for key, kind in _FACTS.items() if not isinstance(facts.get(key), kind)]
    if wrong:
        raise WeightsError(
            f"{file.path} has no config.json beside it and was not prepared by this version of outrider: "
            f"its metadata lacks {', '.join(wrong)}. Give the GGUF file that it was prepared from."
        )
    tokenizer_path = directory / _TOKENIZER_NAME
    if not tokenizer_path.is_file() or _sha256(tokenizer_path.read_bytes()) != facts["tokenizer_sha256"]:
        raise WeightsError(f"{tokenizer_path} is missing or not the one that was prepared.")
    tensors = _unflatten(file.tensors(), facts["group_sizes"], path=file.path)
    return Prepared(facts["config"], tensors, facts["norm_offset"], tokenizer_path, facts["source_sha256"])


def _prepare(path: Path, directory: Path, *, sha256: str, progress: Callable[[str], None]) -> None:
    progress(f"Preparing {path.name} (once)")
    file = open_gemma_gguf(path)
    config, tokenizer_text, weights = gguf_config(file), tokenizer_json(file).encode(), gguf_tensors(file)
    tensors = _flat(weights)
    for name, tensor in tensors.items():
        check_finite(name, tensor, path=path)
    facts = {
        "config": config,
        "group_sizes": {w.name: w.group_size for w in weights.values() if isinstance(w, BlockInt8Weight)},
        "norm_offset": NORM_OFFSET,
        "source_sha256": sha256,
        "tokenizer_sha256": _sha256(tokenizer_text),
    }
    with cache_folder(directory.parent):
        unfinished = _new_directory(directory)
        try:
            (unfinished / _TOKENIZER_NAME).write_bytes(tokenizer_text)
            _save(tensors, unfinished / _WEIGHTS_NAME, metadata={"outrider": json.dumps(facts)})
            _publish(unfinished, directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _save(tensors: dict[str, Tensor], path: Path, *, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flat(weights: dict[str, PackedWeight]) -> dict[str, Tensor]:
    flat = {}
    for name, weight in weights.items():
        if isinstance(weight, DenseWeight):
            flat[name] = weight.values
            continue
        flat[f"{name}.values"], flat[f"{name}.scales"] = weight.values, weight.scales
        if weight.offsets is not None:
            flat[f"{name}.offsets"] = weight.offsets
    return flat


def _unflatten(stored: dict[str, Tensor], group_sizes: dict[str, Any], *, path: Path) -> dict[str, PackedWeight]:
    weights: dict[str, PackedWeight] = {}
    for name, group_size in group_sizes.items():
        values, scales = stored.pop(f"{name}.values", None), stored.pop(f"{name}.scales", None)
        offsets = stored.pop(f"{name}.offsets", None)
        if values is None or scales is None or not _is_grouped(values, scales, offsets, group_size):
            raise WeightsError(f"{path}: tensor {name} does not come in groups of {group_size!r}.")
        weights[name] = BlockInt8Weight(name, values, scales, offsets, group_size)
    weights.update({name: DenseWeight(name, values) for name, values in stored.items()})
    return weights


def _is_grouped(values: Tensor, scales: Tensor, offsets: Tensor | None, group_size: Any) -> bool:
    if type(group_size) is not int or group_size < 1 or values.dim() != 2 or values.shape[1] % group_size:
        return False
    expected = (values.shape[0], values.shape[1] // group_size)
    return values.dtype == torch.int8 and all(
        block is None or (tuple(block.shape) == expected and block.dtype == torch.float32)
        for block in (scales, offsets)
    )


def _publish(unfinished: Path, directory: Path) -> None:
    try:
        unfinished.rename(directory)
    except OSError:
        # Another process finished the same work first; its result is as good as ours.
        if not directory.is_dir():
            raise


def _new_directory(directory: Path) -> Path:
    """An empty place to prepare in, beside `directory`; what killed processes left there long ago is removed."""
    for left_over in directory.parent.glob(f"*{_UNFINISHED}"):
        with suppress(FileNotFoundError):  # its process has just finished
            if time.time() - left_over.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(left_over, ignore_errors=True)
    unfinished = directory.with_name(f"{directory.name}.{os.getpid()}{_UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    return unfinished
