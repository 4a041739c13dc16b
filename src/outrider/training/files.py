"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from outrider.errors import ConfigError


def write_whole(path: Path, write: Callable[[BinaryIO], object], *, what: str) -> None:
    """Let `write` fill a file beside `path`, then put it in its place; ConfigError, naming `what`, if that fails.

    A file that was there before stays till the end, so that a full disk costs nothing.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{what} {path} could not be written: {error}. One written before is untouched; make room and go on."
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
