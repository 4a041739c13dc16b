"""Read a Hugging Face directory: config.json and one safetensors file, or shards with their index.

Headers are read and checked at once, tensors one at a time, when they are asked for. What quantised tensors mean is in
`quantization.py` (declared), `layouts.py` (stored) and `low_bit.py` (as numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import LocateError, WeightsError
from outrider.weights.file_head import json_object
from outrider.weights.layouts import Header, Plan, plan_weights, read_weight
from outrider.weights.locate import is_name_plan
from outrider.weights.name_plan import read_name_plan
from outrider.weights.packed import PackedWeight
from outrider.weights.quantization import Scheme, read_scheme
from outrider.weights.safetensors_file import SafetensorsFile, check_safetensors

INDEX_NAME = "model.safetensors.index.json"


class StoredWeights(Mapping[str, PackedWeight]):
    """The weights that checked headers make up, by name. Each look-up reads that weight's tensors from the mapped file,
    and checks its numbers; nothing is kept. So a checkpoint larger than memory passes through one weight at a time.
    """

    def __init__(
        self, headers: Mapping[str, Header], read: Callable[[str], Tensor], scheme: Scheme | None, *, source: Path
    ) -> None:
        self.headers: Mapping[str, Header] = headers
        """Of every stored tensor, by name."""
        self.plans: Mapping[str, Plan] = plan_weights(headers, scheme, source=source)
        """Which stored tensors each weight consists of."""
        self._read = read

    def __getitem__(self, name: str) -> PackedWeight:
        return read_weight(self.plans[name], self.headers, self._read)

    def __contains__(self, name: object) -> bool:
        return name in self.plans  # Mapping's own would read the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)


def load_safetensors_dir(path: Path, *, without_numbers: bool = False) -> tuple[dict[str, Any], StoredWeights]:
    """Config and weights of a directory. Every header is checked before any tensor is read.

    `without_numbers` gives weights on the meta device: names, shapes and dtypes, no tensor is ever read. Then, and only
    then, the directory may be a name plan; LocateError otherwise.
    """
    config = read_config(path)
    scheme = read_scheme(config, path=path)
    files: dict[str, SafetensorsFile] = {}
    if is_name_plan(path):
        if not without_numbers:
            raise LocateError(
                f"{path} is a name plan: it has no numbers, and only `outrider doctor` reads it. Give the checkpoint "
                "itself."
            )
        headers = read_name_plan(path).headers
    else:
        files = check_files(path)
        headers = {name: Header(file.path, file.dtypes[name], file.shapes[name]) for name, file in files.items()}

    def read(name: str) -> Tensor:
        return headers[name].blank() if without_numbers else files[name].tensor(name)

    return config, StoredWeights(headers, read, scheme, source=path)


def check_files(path: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor of a directory, all headers checked, against each other and their index too."""
    files = [check_safetensors(file) for file in weight_files(path)]
    _check_repeats(path, files)
    _check_index(path, files)
    return {name: file for file in files for name in file.shapes}


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
