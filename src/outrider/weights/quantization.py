"""What a directory declares about its quantised weights: `quantization_config`, or ModelOpt's `hf_quant_config.json`.

Only declarations are read here. Which tensors a layout consists of is in `layouts.py`, what they mean in `low_bit.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.file_head import json_object
from outrider.weights.low_bit import NVFP4_GROUP

MODELOPT_NAME = "hf_quant_config.json"


class Layout(StrEnum):
    """How quantised weights are stored; the values of compressed-tensors are what its `format` says."""

    INT8 = "int-quantized"
    INT4 = "pack-quantized"
    FLOAT8 = "float-quantized"
    NVFP4 = "nvfp4-pack-quantized"
    MODELOPT_NVFP4 = "NVFP4"
    MODELOPT_FLOAT8 = "FP8"


@dataclass(frozen=True)
class Scheme:
    """The one quantisation of a directory's weights."""

    layout: Layout
    group_size: int
    """Inputs that share a scale; 0 for 8-bit floats, whose scales follow `block`."""
    is_symmetric: bool = True
    block: tuple[int, int] | None = None
    """(outputs, inputs) that share a scale, of 8-bit floats; 0 stands for all of them."""
    ignored: tuple[str, ...] = ()
    """Modules that are declared not to be quantised: names, patterns, or "re:" and a regular expression."""

    def ignores(self, module: str) -> bool:
        """True for a module that the declaration leaves alone, itself or with all that is below a module."""
        return any(_matches(pattern, module) or module.startswith(f"{pattern}.") for pattern in self.ignored)


def read_scheme(config: dict[str, Any], *, path: Path) -> Scheme | None:
    """The quantisation that the directory `path` declares in its `config` or beside it; None where it declares none.

    UnsupportedModelError for one that we cannot read, WeightsError for a declaration that is malformed.
    """
    declared, beside = config.get("quantization_config"), path / MODELOPT_NAME
    if declared is None:
        return _read_modelopt_file(beside) if beside.is_file() else None
    source = path / "config.json"
    declared = _object(declared, "quantization_config", source=source)
    if declared.get("quant_method") == "modelopt":
        scheme = _modelopt_scheme(declared, declared.get("ignore"), source=source)
    else:
        scheme = _compressed_tensors_scheme(declared, source=source)
    if not beside.is_file():
        return scheme
    other = _read_modelopt_file(beside)
    if other.layout != scheme.layout:
        raise WeightsError(f"{beside} and {source} declare different quantisations. Download both again.")
    return replace(scheme, ignored=tuple(dict.fromkeys((*scheme.ignored, *other.ignored))))


def _compressed_tensors_scheme(declared: dict[str, Any], *, source: Path) -> Scheme:
    groups = list(_object(declared.get("config_groups", {}), "config_groups", source=source).values())
    group = _object(groups[0], "the group in config_groups", source=source) if len(groups) == 1 else {}
    weights = _object(group.get("weights", {}), "weights of config_groups", source=source)
    is_ours = declared.get("quant_method") == "compressed-tensors"
    _refuse_what_changes_numbers(declared, weights, source=source)
    ignored = _texts(declared.get("ignore"), "ignore", source=source)
    scheme = _scheme_of(str(declared.get("format")), weights, ignored) if is_ours else None
    if scheme is None:
        raise _unsupported(declared.get("quant_method"), declared.get("format"), weights or groups, source=source)
    return scheme


def _refuse_what_changes_numbers(declared: dict[str, Any], weights: dict[str, Any], *, source: Path) -> None:
    """UnsupportedModelError for fields that make other numbers of the same tensors."""
    sparsity = declared.get("sparsity_config")
    wrong = {
        "transform_config": bool(declared.get("transform_config")),
        "sparsity_config": bool(sparsity) and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"),
        "actorder": weights.get("actorder") not in (None, False, "weight", "static"),  # "group" shuffles the inputs
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            raise UnsupportedModelError(f"{source}: quantization_config has {field}, which is not supported.")


def _scheme_of(layout: str, weights: dict[str, Any], ignored: tuple[str, ...]) -> Scheme | None:
    """The scheme of a layout and its weight arguments; None where they are not ones that we read together."""
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
    is_symmetric, group_size = weights.get("symmetric", True), weights.get("group_size")
    if not isinstance(is_symmetric, bool):
        return None
    is_grouped = type(group_size) is int and group_size > 0
    if layout == Layout.INT8 and kind == ("int", 8, "group") and is_grouped and is_symmetric:
        return Scheme(Layout.INT8, int(group_size or 0), ignored=ignored)
    if layout == Layout.INT4 and kind == ("int", 4, "group") and is_grouped:
        return Scheme(Layout.INT4, int(group_size or 0), is_symmetric, ignored=ignored)
    if layout == Layout.NVFP4 and kind == ("float", 4, "tensor_group") and is_symmetric:
        return Scheme(Layout.NVFP4, NVFP4_GROUP, ignored=ignored) if group_size == NVFP4_GROUP else None
    block = _float8_block(kind[2], weights.get("block_structure"))
    if layout == Layout.FLOAT8 and kind[:2] == ("float", 8) and block is not None and is_symmetric:
        return Scheme(Layout.FLOAT8, 0, block=block, ignored=ignored)
    return None


def _float8_block(strategy: Any, structure: Any) -> tuple[int, int] | None:
    if strategy == "block" and isinstance(structure, list) and len(structure) == 2:
        rows, columns = structure
        is_sound = type(rows) is int and type(columns) is int and rows > 0 and columns > 0
        return (rows, columns) if is_sound else None
    return {"tensor": (0, 0), "channel": (1, 0)}.get(strategy) if isinstance(strategy, str) else None


def _read_modelopt_file(source: Path) -> Scheme:
    content = json_object(source.read_bytes(), what=str(source))
    declared = _object(content.get("quantization"), "quantization", source=source)
    return _modelopt_scheme(declared, declared.get("exclude_modules"), source=source)


def _modelopt_scheme(declared: dict[str, Any], ignored: Any, *, source: Path) -> Scheme:
    group_sizes = {_group_size(declared, source=source)}
    for group in _object(declared.get("config_groups", {}), "config_groups", source=source).values():
        group = _object(group, "the group in config_groups", source=source)
        weights = _object(group.get("weights", {}), "weights of config_groups", source=source)
        group_sizes.add(_group_size(weights, source=source))
    algorithm, sizes = declared.get("quant_algo"), group_sizes - {None}
    modules = _texts(ignored, "ignore", source=source)
    if algorithm == Layout.MODELOPT_NVFP4 and sizes <= {NVFP4_GROUP}:
        return Scheme(Layout.MODELOPT_NVFP4, NVFP4_GROUP, ignored=modules)
    if algorithm == Layout.MODELOPT_FLOAT8 and not sizes:
        return Scheme(Layout.MODELOPT_FLOAT8, 0, block=(0, 0), ignored=modules)
    raise _unsupported("modelopt", algorithm, f"group sizes {sizes}", source=source)


def _group_size(declared: dict[str, Any], *, source: Path) -> int | None:
    size = declared.get("group_size")
    if size is not None and type(size) is not int:
        raise WeightsError(f"{source}: group_size is {size!r}; expected a whole number.")
    return size


def _unsupported(method: Any, layout: Any, details: Any, *, source: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source} declares the quantisation {method} / {layout} with {details}. Supported: "
        "compressed-tensors with one group of weights, int-quantized (8-bit symmetric, strategy 'group'), "
        "pack-quantized (4-bit, strategy 'group'), float-quantized (8-bit, strategy 'tensor', 'channel' or 'block') or "
        "nvfp4-pack-quantized (groups of 16); modelopt NVFP4 (groups of 16) or FP8 (one scale a matrix)."
    )


def _object(value: Any, field: str, *, source: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WeightsError(f"{source}: {field} is {value!r}; expected an object.")
    return value


def _texts(value: Any, field: str, *, source: Path) -> tuple[str, ...]:
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise WeightsError(f"{source}: {field} is {value!r}; expected a list of module names.")
    for pattern in value or ():
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise WeightsError(
                f"{source}: {field} has {pattern!r}, which is no regular expression: {error}."
            ) from error
    return tuple(value or ())


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return fnmatchcase(module, pattern)
