"""Where commands write: the result on stdout, as one JSON object if asked for, and everything else on stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.benchmarking.record import RecordFile
from outrider.errors import ConfigError, OutriderError

console = Console(stderr=True)
Found = tuple[dict[str, Any], Sequence[dict[str, Any]]]
"""A record, and what is missing of it."""


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


@contextmanager
def progress_bar(num_steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that moves on with every message; the message says what is under way."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task, num_begun = bar.add_task("", total=num_steps), 0

        def report(message: str) -> None:
            nonlocal num_begun
            bar.update(task, description=message, completed=num_begun)
            num_begun += 1

        yield report
        bar.update(task, completed=num_steps)


@contextmanager
def stoppable(file: RecordFile, found: Callable[[], Found | None]) -> Iterator[None]:
    """What leaves a record of what it has found, however it ends: by Ctrl-C, SIGTERM, a hang-up or a fault.

    `found` gives that record, with what is missing of it; None where nothing is finished. The signals end the command
    with exit code 1, unless they are ignored, as under nohup.
    """

    def stop(number: int, _frame: object) -> None:
        raise _SignalExit(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    except BaseException as error:
        kept = found()
        if kept is not None:
            file.write(kept[0], missing=kept[1], stopped=_cause(error))
        if kept is not None or isinstance(error, (KeyboardInterrupt, SystemExit)):
            progress_line(f"stopped: {file.kept}")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _SignalExit(SystemExit):
    """The end that a signal asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(1)
        self.name = name


def _cause(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    if isinstance(error, _SignalExit):
        return error.name
    return str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"


def new_file(option: str, path: Path | None) -> None:
    """Refuse a record's path before work begins if it exists or cannot be written; None is no file, and fine."""
    if path is not None and writable(option, path).exists():
        raise ConfigError(f"{option} {path} exists, and records are never overwritten. Name a new file.")


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
