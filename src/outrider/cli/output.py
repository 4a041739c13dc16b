"""Where commands write: the result on stdout, as one JSON object if asked for, and everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.errors import ConfigError

console = Console(stderr=True)


def emit_json(value: Any) -> None:
    """Print one JSON object, alone, on stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def show(result: Any) -> None:
    """A result for people, on stdout."""
    Console().print(result)


def progress_line(message: str) -> None:
    """One line of progress on stderr."""
    console.print(message, highlight=False, markup=False)


def writable(option: str, path: Path, *, is_directory: bool = False) -> Path:
    """The path, checked before work begins whose result is to be written there; missing folders are made."""
    folder = path if is_directory else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}. Choose a path that can be written.") from error
    if not os.access(folder, os.W_OK) or (not is_directory and path.is_dir()):
        raise ConfigError(f"{option} {path} cannot be written. Choose another path.")
    return path
