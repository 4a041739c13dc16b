"""The prepared form of a GGUF file: unpacked once into the cache, mapped into memory ever after.

A directory `prepared/<sha256>-v<version>` holds `model.safetensors` and `tokenizer.json`. It is filled under another
name and renamed when it is whole, so an interrupted preparation is never used.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import LocateError, WeightsError
from outrider.weights.gguf import NORM_OFFSET, gguf_config, gguf_tensors, open_gemma_gguf
from outrider.weights.gguf_tokenizer import tokenizer_json
from outrider.weights.locate import cache_dir
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight
from outrider.weights.safetensors_file import check_safetensors

PREPARED_VERSION = 2  # raise it whenever what is written here changes
_WEIGHTS_NAME, _TOKENIZER_NAME = "model.safetensors", "tokenizer.json"
_UNFINISHED = ".unfinished"
_ABANDONED_AFTER_S = 3600.0


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
        except (WeightsError, LocateError) as error:
            progress(f"The prepared weights in {directory} are damaged ({error}). Making them again.")
            shutil.rmtree(directory, ignore_errors=True)
    _prepare(path, directory, sha256=sha256, progress=progress)
    return read_prepared(directory)


def read_prepared(directory: Path) -> Prepared:
    """Load a prepared directory; WeightsError if it is damaged or something else."""
    file = check_safetensors(directory / _WEIGHTS_NAME)
    try:
        facts = json.loads(file.metadata["outrider"])
        tensors = _unflatten(file.tensors(), facts["group_sizes"])
        prepared = Prepared(
            facts["config"], tensors, facts["norm_offset"], directory / _TOKENIZER_NAME, facts["source_sha256"]
        )
        tokenizer_bytes = facts["tokenizer_bytes"]
    except (KeyError, ValueError) as error:
        raise WeightsError(
            f"{file.path} has no config.json beside it and was not prepared by outrider: {error}."
        ) from error
    if not prepared.tokenizer_path.is_file() or prepared.tokenizer_path.stat().st_size != tokenizer_bytes:
        raise WeightsError(f"{prepared.tokenizer_path} is missing or not of {tokenizer_bytes} bytes.")
    return prepared


def _prepare(path: Path, directory: Path, *, sha256: str, progress: Callable[[str], None]) -> None:
    progress(f"Preparing {path.name} (once)")
    file = open_gemma_gguf(path)
    config, tokenizer_text, weights = gguf_config(file), tokenizer_json(file), gguf_tensors(file)
    unfinished = _new_directory(directory)
    try:
        tokenizer_path = unfinished / _TOKENIZER_NAME
        tokenizer_path.write_text(tokenizer_text, encoding="utf-8")
        facts = {
            "config": config,
            "group_sizes": {w.name: w.group_size for w in weights.values() if isinstance(w, BlockInt8Weight)},
            "norm_offset": NORM_OFFSET,
            "source_sha256": sha256,
            "tokenizer_bytes": tokenizer_path.stat().st_size,
        }
        save_file(_flat(weights), unfinished / _WEIGHTS_NAME, metadata={"outrider": json.dumps(facts)})
        _publish(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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


def _unflatten(stored: dict[str, Tensor], group_sizes: dict[str, int]) -> dict[str, PackedWeight]:
    weights: dict[str, PackedWeight] = {}
    for name, group_size in group_sizes.items():
        values, scales = stored.pop(f"{name}.values"), stored.pop(f"{name}.scales")
        weights[name] = BlockInt8Weight(name, values, scales, stored.pop(f"{name}.offsets", None), group_size)
    weights.update({name: DenseWeight(name, values) for name, values in stored.items()})
    return weights


def _publish(unfinished: Path, directory: Path) -> None:
    try:
        unfinished.rename(directory)
    except OSError:
        # Another process finished the same work first; its result is as good as ours.
        if not directory.is_dir():
            raise


def _new_directory(directory: Path) -> Path:
    """An empty place to prepare in, beside `directory`; what killed processes left there long ago is removed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    for left_over in directory.parent.glob(f"*{_UNFINISHED}"):
        if time.time() - left_over.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(left_over, ignore_errors=True)
    unfinished = directory.with_name(f"{directory.name}.{os.getpid()}{_UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    return unfinished
