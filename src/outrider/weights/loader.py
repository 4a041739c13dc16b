"""Load a target's checkpoint, whatever its format, and see to it that a model uses all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.dummy import DummyWeights
from outrider.weights.fields import Fields
from outrider.weights.file_head import read_head
from outrider.weights.locate import file_sha256
from outrider.weights.packed import DenseWeight, PackedWeight
from outrider.weights.prepared import Prepared, is_prepared, load_prepared, read_prepared
from outrider.weights.safetensors_dir import load_safetensors_dir, read_config, read_end_token_ids, weight_files

__all__ = ["Checkpoint", "TensorClaims", "load_checkpoint", "load_safetensors_dir"]

# What a stored norm weight lacks to be the factor: Hugging Face Gemma 3 multiplies by (1 + weight), Gemma 4 by weight.
_GEMMA4_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
_NORM_OFFSETS = {"gemma3_text": 1.0, **dict.fromkeys(_GEMMA4_TYPES, 0.0)}


@dataclass(frozen=True)
class Checkpoint:
    """A target's weights and the facts that its format declares. Tensors lie in mapped files, on the CPU.

    Those of a directory are read one at a time, whenever they are asked for; any other mapping does as well.
    """

    config: dict[str, Any]
    """Hugging Face style, with the `model_type` the registry knows it by."""
    tensors: Mapping[str, PackedWeight]
    """By Hugging Face name."""
    norm_offset: float
    """A norm multiplies by (norm_offset + weight)."""
    tokenizer_path: Path
    source: Path
    source_sha256: str | None
    """Of the GGUF file; None for a directory, whose weights are not all read to load it."""

    def sha256(self) -> str:
        """Of the GGUF file; of a directory, over config.json and all weight files, which are read for it."""
        return self.source_sha256 or directory_sha256(self.source)


def load_checkpoint(
    path: Path, *, progress: Callable[[str], None] | None = None, without_numbers: bool = False
) -> Checkpoint:
    """Load a GGUF file (prepared into the cache the first time) or a directory of safetensors files.

    `progress` gets a sentence before each step that takes seconds. `without_numbers` leaves a directory's weights
    unread: they are tensors on the meta device, and the directory may be a name plan.
    """
    report = progress or _ignore
    if path.is_dir() and is_prepared(path):
        return _from_prepared(read_prepared(path), path)
    if path.is_dir():
        return _load_directory(path, without_numbers=without_numbers)
    read_head(path, num_bytes=1)
    return _from_prepared(load_prepared(path, sha256=file_sha256(path), progress=report), path)


def _from_prepared(prepared: Prepared, source: Path) -> Checkpoint:
    return Checkpoint(
        prepared.config,
        prepared.tensors,
        prepared.norm_offset,
        prepared.tokenizer_path,
        source=source,
        source_sha256=prepared.source_sha256,
    )


def _ignore(message: str) -> None:
    del message


def _load_directory(path: Path, *, without_numbers: bool) -> Checkpoint:
    model_type = Fields(read_config(path), source=path / "config.json").text("model_type", default=None)
    if model_type not in _NORM_OFFSETS:
        supported = ", ".join(_NORM_OFFSETS)
        raise UnsupportedModelError(
            f"{path / 'config.json'} has model_type {model_type!r}; targets have {supported}. A drafter goes in "
            "--drafter."
        )
    config, tensors = load_safetensors_dir(path, without_numbers=without_numbers)
    end_token_ids = read_end_token_ids(path)
    return Checkpoint(
        {**config, "eos_token_id": end_token_ids} if end_token_ids else config,
        tensors,
        _NORM_OFFSETS[model_type],
        path / "tokenizer.json",
        source=path,
        source_sha256=None,
    )


def directory_sha256(path: Path) -> str:
    """Of a directory: over config.json and all weight files, which are read for it."""
    digest = hashlib.sha256()
    for file in [path / "config.json", *weight_files(path)]:
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


class TensorClaims:
    """Hands out a checkpoint's tensors, each once and in the expected shape, and reports what nobody took."""

    def __init__(self, tensors: Mapping[str, PackedWeight], *, source: Path) -> None:
        self._tensors = tensors
        self._source = source
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shapes: tuple[int, ...]) -> PackedWeight:
        """Return tensor `name` of floating-point numbers, packed or plain.

        WeightsError if it is missing, has none of the shapes, holds other numbers or was taken before.
        """
        weight = self._take(name, *shapes)
        if type(weight) is DenseWeight and not weight.values.dtype.is_floating_point:
            raise WeightsError(self._wrong_numbers(name, weight, "floating-point numbers"))
        return weight

    def take_table(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """Return the integers or flags of tensor `name`; WeightsError as `take`."""
        weight = self._take(name, shape)
        if type(weight) is not DenseWeight or weight.values.dtype not in dtypes:
            raise WeightsError(self._wrong_numbers(name, weight, " or ".join(map(str, dtypes))))
        return weight.values

    def _wrong_numbers(self, name: str, weight: PackedWeight, expected: str) -> str:
        found = weight.values.dtype if type(weight) is DenseWeight else "packed"
        return f"tensor {name} of {self._source} is {found}; expected {expected}. It is not what its name says."

    def _take(self, name: str, *shapes: tuple[int, ...]) -> PackedWeight:
        if name in self._taken:
            raise WeightsError(f"tensor {name} of {self._source} is claimed twice.")
        if isinstance(self._tensors, DummyWeights):
            weight: PackedWeight | None = self._tensors.claim(name, shapes[0])
        else:
            weight = self._tensors.get(name)
        if weight is None:
            raise WeightsError(f"tensor {name} is missing from {self._source}.{self._hint(name)}")
        if tuple(weight.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise WeightsError(
                f"tensor {name} of {self._source} has shape {tuple(weight.shape)}, but its config needs {expected}."
            )
        self._taken.add(name)
        return weight

    def finish(self, skip: Iterable[str] = ()) -> list[str]:
        """Raise WeightsError if tensors are left over, except those matching a pattern in `skip` ("vision_tower.*").

        Returns the names that were skipped, for a report.
        """
        patterns = tuple(skip)
        left_over = [name for name in self._tensors if name not in self._taken]
        skipped = [name for name in left_over if any(fnmatchcase(name, pattern) for pattern in patterns)]
        unclaimed = sorted(set(left_over) - set(skipped))
        if unclaimed:
            more = f" and {len(unclaimed) - 5} more" if len(unclaimed) > 5 else ""
            raise WeightsError(
                f"{self._source} has tensors that this model does not use: {', '.join(unclaimed[:5])}{more}. "
                "Its config.json describes another model, or the file is not what it seems."
            )
        return sorted(skipped)

    def _hint(self, name: str) -> str:
        """Name a tensor that differs only by a prefix, the usual way to miss one."""
        for other in self._tensors:
            if other not in self._taken and (other.endswith("." + name) or name.endswith("." + other)):
                return f" It has {other}: rename its tensors, a prefix is never guessed."
        return ""
