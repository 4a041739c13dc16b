"""Records as a report reads them: checked for their shape, refused by name where it is another one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.benchmarking.record import SCHEMA
from outrider.errors import ConfigError

SHAPE: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "environment": dict,
    "workload": dict,
    "arms": list,
    "rows": list,
    "summary": (dict, list),
}


@dataclass(frozen=True)
class Record:
    """One record (design §5) and the file it came from."""

    path: Path
    fields: dict[str, Any]

    @property
    def stem(self) -> str:
        """The file's name without its ending: what a reader knows the record by."""
        return self.path.stem

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """The summary's objects: one for one comparison, several for a table."""
        summary = self.fields["summary"]
        return summary if isinstance(summary, list) else [summary]

    @property
    def is_published(self) -> bool:
        """True where figures were typed in from what others published; nothing here measured them."""
        return self.fields.get("published") is True


def find_records(paths: Sequence[Path]) -> list[Path]:
    """The files named, and every *.json of the folders named, once each; ConfigError for what is not there."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("*.json"))
            if not inside:
                raise ConfigError(f"{path} holds no *.json. Name records, or a folder of them.")
            found |= dict.fromkeys(inside)
        elif path.is_file():
            found[path] = None
        else:
            raise ConfigError(f"{path} is not there. Name records, as --record of the bench commands writes them.")
    return list(found)


def read_record(path: Path) -> Record:
    """Read and check a record; ConfigError naming the file and what about it is wrong."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}). Make the record again, or leave it out.") from None
    fault = _fault(fields)
    if fault:
        raise ConfigError(f"{path} is no record: {fault}. Name files that --record of the bench commands wrote.")
    return Record(path, fields)


def _fault(fields: Any) -> str | None:
    if not isinstance(fields, dict):
        return "it is not a JSON object"
    if fields.get("schema") != SCHEMA:
        return f"its schema is {fields.get('schema')!r}, and this version reads {SCHEMA}"
    for key, kind in SHAPE.items():
        if not isinstance(fields.get(key), kind):
            return f"its {key!r} is missing or of the wrong kind"
    if not isinstance(fields["workload"].get("name"), str):
        return "its workload has no name"
    for key in ("arms", "rows", "summary"):
        if isinstance(fields[key], list) and not _are_objects(fields[key]):
            return f"its {key!r} holds something that is not an object"
    return None


def _are_objects(values: Iterable[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)
