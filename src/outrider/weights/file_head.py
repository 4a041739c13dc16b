"""The first look at any weight file, the same on every load path: is it there, is it data, is it the right kind?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import LocateError, WeightsError

_LFS_POINTER = b"version https://git-lfs"


def read_head(path: Path, *, num_bytes: int) -> bytes:
    """The first `num_bytes` bytes (fewer in a shorter file); refuses a missing or empty file and a git-lfs pointer."""
    if not path.is_file():
        raise LocateError(f"{path} does not exist or is not a file.")
    with path.open("rb") as file:
        head = file.read(max(num_bytes, len(_LFS_POINTER)))
    if not head:
        raise WeightsError(f"{path} is empty: expected weights, found 0 bytes. Download it again.")
    if head.startswith(_LFS_POINTER):
        raise WeightsError(
            f"{path} is a git-lfs pointer of {path.stat().st_size} bytes, not the weights. Run `git lfs pull` there."
        )
    return head[:num_bytes]


def size_error(path: Path, *, expected_bytes: int, found_bytes: int) -> WeightsError:
    """The error for a file whose size is not what its own header says."""
    if found_bytes < expected_bytes:
        verdict = "is cut off"
    else:
        verdict = f"has {found_bytes - expected_bytes} trailing bytes that no tensor owns"
    return WeightsError(f"{path} {verdict}: expected {expected_bytes} bytes, found {found_bytes}. Download it again.")


def json_object(text: str | bytes, *, what: str) -> dict[str, Any]:
    """The JSON object that `text` is; `what` names the text where it is something else or repeats a key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise WeightsError(f"{what} has {key} twice. Download it again.")
            found[key] = value
        return found

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{what} is not JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{what} is not a JSON object. Download it again.")
    return content
