"""Checkpoints by their name on a model hub: fetched once into the hub library's own cache, local ever after."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.errors import LocateError

_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_NAME = re.compile(rf"{_PART}/{_PART}(/{_PART})?")
_PATTERNS = ["*.json", "*.safetensors"]  # never code, never a format that holds code


def is_hub_name(name: str) -> bool:
    """True for "owner/name" or "owner/name/folder" that is no path on this machine and no .gguf file."""
    return _HUB_NAME.fullmatch(name) is not None and not name.endswith(".gguf") and not Path(name).exists()


def fetch_from_hub(name: str) -> Path:
    """The directory of a checkpoint "owner/name" with what we read of it, in the hub library's cache.

    A third part is a folder of it, where a repository holds several checkpoints.

    Without a network a copy that is in the hub library's cache will do. LocateError where there is neither, or where
    the hub has no such checkpoint or does not give it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    owner, repository, *folder = name.split("/")
    within = "".join(f"{part}/" for part in folder)
    try:
        snapshot = snapshot_download(
            f"{owner}/{repository}",
            allow_patterns=[within + pattern for pattern in _PATTERNS],
            ignore_patterns=[f"{within}*/*"],
        )
    except LocalEntryNotFoundError as error:
        raise LocateError(
            f"{name} is not a path, and as a name on the model hub it cannot be fetched: the hub cannot be reached, "
            "and no copy is on this machine. Check the network, or give a local directory."
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise LocateError(
            f"{name} is not a path, and the model hub does not give a checkpoint of that name: {_first_line(error)} "
            "Check the name; for one that needs a permission, accept its terms and run `hf auth login`."
        ) from error
    path = Path(snapshot, *folder)
    if not path.is_dir():
        raise LocateError(f"{owner}/{repository} has no folder {folder[0]} with a checkpoint in it. Check the name.")
    return path


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
