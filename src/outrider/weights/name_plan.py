"""Name plans: a directory that lists a checkpoint's tensors instead of holding them, so that `doctor` can check a full
size without its bytes.

`config.json` is the checkpoint's own. `tensors.json` has names, dtypes and shapes, numbers in names written together:
"layers.{0-4,6}.norm.weight" stands for six tensors. `evidence` says how names and shapes are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from outrider.errors import WeightsError
from outrider.weights.fields import Fields
from outrider.weights.file_head import json_object
from outrider.weights.layouts import Header
from outrider.weights.locate import PLAN_NAME
from outrider.weights.safetensors_file import DTYPES

SCHEMA = 1
EVIDENCE = {
    "read": "names and shapes were read from a listing of the real checkpoint",
    "derived": "names are derived, not read from the real checkpoint",
}
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
_MAX_PARAMETERS = 10**15
_MAX_TENSORS = 200_000


@dataclass(frozen=True)
class NamePlan:
    """What a plan says of a checkpoint."""

    checkpoint: str
    """Its name on the model hub."""
    evidence: str
    """A key of EVIDENCE."""
    sources: tuple[str, ...]
    """Where names and shapes come from."""
    num_parameters: int | None
    """The published total, where there is one; a tensor of shape [] counts as none in it."""
    headers: dict[str, Header]


def read_name_plan(path: Path) -> NamePlan:
    """The plan in the directory `path`; WeightsError, naming field or tensor, for one that is malformed."""
    source = path / PLAN_NAME
    content = json_object(source.read_bytes(), what=str(source))
    fields = Fields(content, source=source)
    fields.integer("schema", low=SCHEMA, high=SCHEMA)
    evidence = fields.text("evidence")
    if evidence not in EVIDENCE:
        raise WeightsError(f"{source} has evidence={evidence!r}; expected one of {', '.join(EVIDENCE)}.")
    tensors = content.get("tensors")
    if not isinstance(tensors, dict) or not tensors:
        raise WeightsError(f"{source} has no tensors; expected an object of dtypes and shapes by name.")
    return NamePlan(
        checkpoint=fields.text("checkpoint"),
        evidence=evidence,
        sources=tuple(fields.texts("sources")),
        num_parameters=fields.integer("num_parameters", low=1, high=_MAX_PARAMETERS, default=None),
        headers=_headers(tensors, source=source),
    )


def expand_name(pattern: str, *, source: Path) -> Iterator[str]:
    """The names that a pattern with numbers in braces stands for."""
    texts, braces = _BRACES.split(pattern)[::2], _BRACES.findall(pattern)
    if any("{" in text or "}" in text for text in texts) or not all(map(_NUMBERS.fullmatch, braces)):
        raise WeightsError(
            f"{source}: {pattern!r} is no tensor's name; braces hold numbers or ranges, as in {{0-4,6}}."
        )
    for numbers in product(*(_numbers(listed) for listed in braces)):
        yield texts[0] + "".join(f"{number}{text}" for number, text in zip(numbers, texts[1:], strict=True))


def _numbers(listed: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]."""
    found: list[int] = []
    for each in listed.split(","):
        first, _, last = each.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _headers(tensors: Mapping[str, Any], *, source: Path) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for pattern, entry in tensors.items():
        header = _header(pattern, entry, source=source)
        num_before = len(headers)
        for name in expand_name(pattern, source=source):
            if name in headers:
                raise WeightsError(f"{source} lists tensor {name} twice. Make the plan again.")
            if len(headers) == _MAX_TENSORS:
                raise WeightsError(
                    f"{source} lists more than {_MAX_TENSORS} tensors, with {pattern!r}; no checkpoint has so many."
                )
            headers[name] = header
        if len(headers) == num_before:
            raise WeightsError(f"{source} has an empty range in {pattern!r}. Make the plan again.")
    return headers


def _header(pattern: str, entry: Any, *, source: Path) -> Header:
    dtype, shape = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
    is_shape = isinstance(shape, list) and all(type(extent) is int and extent >= 0 for extent in shape)
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, list) or not is_shape:
        raise WeightsError(f"{source} has {pattern!r}: {entry!r}; expected dtype and shape, as in ['BF16', [4, 8]].")
    if math.prod(shape) > _MAX_PARAMETERS or any(extent > _MAX_PARAMETERS for extent in shape):
        raise WeightsError(f"{source} has {pattern!r} of shape {shape}; no tensor has so many numbers.")
    return Header(source, dtype, tuple(shape))
