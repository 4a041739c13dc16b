"""Read a Hugging Face directory: config.json and one safetensors file, or shards with their index.

Plain tensors become dense weights. Of the compressed-tensors formats, int8 groups ("int-quantized") are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import LocateError, UnsupportedModelError, WeightsError
from outrider.weights.file_head import json_object
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight
from outrider.weights.safetensors_file import SafetensorsFile, check_safetensors

INDEX_NAME = "model.safetensors.index.json"
_SCALE_SUFFIX = "_scale"
_INT8_GROUPS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group"}


def load_safetensors_dir(path: Path) -> tuple[dict[str, Any], dict[str, PackedWeight]]:
    """Config and weights of a directory. Every file is checked before any tensor is read; nothing goes to a device."""
    config = read_config(path)
    group_size = _int8_group_size(config, path=path)
    files = [check_safetensors(file) for file in weight_files(path)]
    _check_index(path, files)
    weights: dict[str, PackedWeight] = {}
    for file in files:
        repeated = weights.keys() & file.shapes.keys()
        if repeated:
            raise WeightsError(f"{file.path} repeats tensor {min(repeated)} of another file of {path}.")
        weights.update(_weights(file, group_size=group_size))
    return config, weights


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


def _check_index(path: Path, files: list[SafetensorsFile]) -> None:
    if not (path / INDEX_NAME).is_file():
        return
    listed = {(file_name, name) for name, file_name in _weight_map(path).items()}
    found = {(file.path.name, name) for file in files for name in file.shapes}
    for file_name, name in sorted(listed ^ found):
        where = "has it, but its index does not list it" if (file_name, name) in found else "lacks it"
        raise WeightsError(f"tensor {name}: {path / file_name} {where}. Download it again.")


def _int8_group_size(config: Mapping[str, Any], *, path: Path) -> int | None:
    """Group size of the declared int8 weights; None where the config declares no quantisation."""
    declared = config.get("quantization_config")
    if declared is None:
        return None
    declared = _object(declared, "quantization_config", path=path)
    method, layout = declared.get("quant_method"), declared.get("format")
    groups = list(_object(declared.get("config_groups", {}), "config_groups", path=path).values())
    group = _object(groups[0], "the group in config_groups", path=path) if len(groups) == 1 else {}
    weights = _object(group.get("weights", {}), "weights of config_groups", path=path)
    group_size: Any = weights.get("group_size")
    is_int8_groups = all(weights.get(key) == value for key, value in _INT8_GROUPS.items())
    is_int8_groups &= type(group_size) is int and group_size > 0
    if (method, layout) != ("compressed-tensors", "int-quantized") or not is_int8_groups:
        raise UnsupportedModelError(
            f"{path / 'config.json'} declares the quantisation {method} / {layout} with {weights or groups}. "
            "Supported: compressed-tensors / int-quantized, one group of 8-bit symmetric weights with strategy 'group'."
        )
    return int(group_size)


def _object(value: Any, field: str, *, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WeightsError(f"{path / 'config.json'}: {field} is {value!r}; expected an object.")
    return value


def _weights(file: SafetensorsFile, *, group_size: int | None) -> dict[str, PackedWeight]:
    tensors = file.tensors()
    weights: dict[str, PackedWeight] = {}
    for name, values in tensors.items():
        base = name.removesuffix(_SCALE_SUFFIX)
        if base != name and base in tensors and tensors[base].dtype == torch.int8:
            continue  # read together with its values
        if values.dtype == torch.int8:
            scales = tensors.get(name + _SCALE_SUFFIX)
            weights[name] = _block_weight(file.path, name, values, scales=scales, group_size=group_size)
        else:
            weights[name] = DenseWeight(name, values)
    return weights


def _block_weight(
    path: Path, name: str, values: Tensor, *, scales: Tensor | None, group_size: int | None
) -> BlockInt8Weight:
    if group_size is None:
        raise WeightsError(f"{path}: tensor {name} is int8, but config.json declares no quantization_config.")
    if scales is None:
        raise WeightsError(f"{path}: tensor {name} is int8, but {name}{_SCALE_SUFFIX} is missing.")
    found = tuple(scales.shape)
    if values.dim() != 2 or not scales.is_floating_point():
        raise WeightsError(
            f"{path}: tensor {name} is int8 of shape {tuple(values.shape)} with {scales.dtype} scales; "
            "expected a matrix with floating-point scales."
        )
    expected = (values.shape[0], values.shape[1] // group_size)
    if values.shape[1] % group_size or found != expected:
        raise WeightsError(
            f"{path}: tensor {name}{_SCALE_SUFFIX} has shape {found}, but {name} of shape {tuple(values.shape)} "
            f"in groups of {group_size} needs {expected}."
        )
    return BlockInt8Weight(name, values, scales.to(torch.float32), None, group_size)
