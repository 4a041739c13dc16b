"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from outrider.errors import ConfigError

_FAULTS = (OSError, RuntimeError, SafetensorError)


def write_whole(path: Path, write: Callable[[BinaryIO], object], *, what: str) -> None:
    """Let `write` fill a file beside `path`, then put it in its place; ConfigError, naming `what`, if that fails.

    A file that was there before stays till the end, so that a full disk costs nothing.
    """
    unfinished = _beside(path)
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except _FAULTS as error:
        raise _failed(what, path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_folder(path: Path, fill: Callable[[Path], object], *, what: str) -> None:
    """Let `fill` write files into a folder beside `path`, then put them in their place; errors as `write_whole`.

    Of a folder that was there before, files of the same names are replaced, at the very end.
    """
    unfinished = _beside(path)
    try:
        unfinished.mkdir(parents=True)
        fill(unfinished)
        for file in unfinished.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if path.is_dir():
            for file in unfinished.iterdir():
                file.replace(path / file.name)
        else:
            unfinished.rename(path)
    except _FAULTS as error:
        raise _failed(what, path, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.unfinished")


def _failed(what: str, path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{what} {path} could not be written: {error}. One written before is untouched; make room and go on."
    )
