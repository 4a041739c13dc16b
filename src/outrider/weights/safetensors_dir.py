"""Read a Hugging Face directory: config.json and one safetensors file, or shards with their index.

Headers are read and checked at once, tensors one at a time, when they are asked for. What quantised tensors mean is in
`quantization.py` (declared), `layouts.py` (stored) and `low_bit.py` (as numbers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import LocateError, WeightsError
from outrider.weights.file_head import json_object
from outrider.weights.layouts import Header, plan_weights, read_weight
from outrider.weights.packed import PackedWeight
from outrider.weights.quantization import Scheme, read_scheme
from outrider.weights.safetensors_file import SafetensorsFile, check_safetensors

INDEX_NAME = "model.safetensors.index.json"


class StoredWeights(Mapping[str, PackedWeight]):
    """The weights of checked files, by name. Each look-up reads that weight's tensors from the mapped file, and checks
    its numbers; nothing is kept. So a checkpoint larger than memory passes through one weight at a time.
    """

    def __init__(self, files: Sequence[SafetensorsFile], scheme: Scheme | None, *, source: Path) -> None:
        self._files = {name: file for file in files for name in file.shapes}
        self._headers = {
            name: Header(file.path, file.dtypes[name], file.shapes[name]) for name, file in self._files.items()
        }
        self._plans = plan_weights(self._headers, scheme, source=source)

    def __getitem__(self, name: str) -> PackedWeight:
        return read_weight(self._plans[name], self._headers, lambda stored: self._files[stored].tensor(stored))

    def __contains__(self, name: object) -> bool:
        return name in self._plans  # Mapping's own would read the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)


def load_safetensors_dir(path: Path) -> tuple[dict[str, Any], StoredWeights]:
    """Config and weights of a directory. Every header is checked before any tensor is read."""
    config = read_config(path)
    scheme = read_scheme(config, path=path)
    files = [check_safetensors(file) for file in weight_files(path)]
    _check_repeats(path, files)
    _check_index(path, files)
    return config, StoredWeights(files, scheme, source=path)


def read_config(path: Path) -> dict[str, Any]:
    """The directory's config.json."""
    config_path = path / "config.json"
    if not path.is_dir():
        raise LocateError(f"{path} is not a directory. Give a directory with config.json and *.safetensors.")
    if not config_path.is_file():
        raise LocateError(f"{config_path} does not exist. Give a directory with config.json and *.safetensors.")
    return _read_json(config_path)


def read_end_token_ids(path: Path) -> list[int]:
    """End tokens that config.json and generation_config.json name together, lowest first; often they differ."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        declared = _read_json(path / name).get("eos_token_id") if (path / name).is_file() else None
        token_ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in token_ids):
            raise WeightsError(f"{path / name} has eos_token_id {declared!r}; expected a token id or a list of them.")
        found.update(token_ids)
    return sorted(found)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory, as its index lists them; a shard that is not there is an error."""
    if (path / INDEX_NAME).is_file():
        files = [path / name for name in sorted(set(_weight_map(path).values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise WeightsError(
                f"{path / INDEX_NAME} names {', '.join(missing)}, which {path} lacks. Download it again."
            )
        return files
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise WeightsError(
            f"{path} has {len(files)} *.safetensors files and no {INDEX_NAME}; expected exactly one file."
        )
    return files


def _read_json(path: Path) -> dict[str, Any]:
    return json_object(path.read_bytes(), what=str(path))


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = _read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path / INDEX_NAME} has no weight_map. Download it again.")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name:
            raise WeightsError(
                f"{path / INDEX_NAME} has tensor {name} in {file_name!r}; expected the name of a file beside it."
            )
    return weight_map


def _check_repeats(path: Path, files: list[SafetensorsFile]) -> None:
    seen: dict[str, str] = {}
    for file in files:
        for name in file.shapes:
            if name in seen:
                raise WeightsError(
                    f"{file.path} repeats tensor {name}, which {path / seen[name]} has. Keep one of them."
                )
            seen[name] = file.path.name


def _check_index(path: Path, files: list[SafetensorsFile]) -> None:
    if not (path / INDEX_NAME).is_file():
        return
    listed = {(file_name, name) for name, file_name in _weight_map(path).items()}
    found = {(file.path.name, name) for file in files for name in file.shapes}
    for file_name, name in sorted(listed ^ found):
        where = "has it, but its index does not list it" if (file_name, name) in found else "lacks it"
        raise WeightsError(f"tensor {name}: {path / file_name} {where}. Download it again.")
