"""Answers as they come, one conversation a line, so that a run that was killed goes on where it was."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError


class Journal:
    """An append-only JSONL file: what the answers depend on in its first line, then a record a conversation."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Open or begin it. ConfigError if it was begun with another header or a line is damaged.

        A last line without its end was cut off with its writer; it is taken off, and its conversation asked again.
        """
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        """By the conversation's key."""
        try:
            self._file = path.open("a+b", buffering=0)  # nothing of a line that failed may be written later
            self._file.seek(0)
            whole, _, _ = self._file.read().rpartition(b"\n")
            self._end = len(whole) + 1 if whole else 0
            self._file.truncate(self._end)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened ({error}). Choose a folder that can be written.") from error
        lines = whole.split(b"\n") if whole else []
        try:
            self._take(lines, header)
            if not lines:
                self._write(header)
        except ConfigError:
            self._file.close()
            raise

    def _take(self, lines: list[bytes], header: dict[str, Any]) -> None:
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                if number == 1:
                    self._check_header(value, header)
                else:
                    self.records[value["key"]] = value
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{self.path}, line {number}, is damaged ({type(error).__name__}). Remove that line, or the file "
                    "to ask everything again."
                ) from error

    def _check_header(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        differing = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
        if differing:
            shown = ", ".join(f"{key} {there.get(key)!s:.20} there, {here.get(key)!s:.20} here" for key in differing)
            raise ConfigError(
                f"{self.path} was begun with another {differing[0]} ({shown}). Go on as it was begun, or name another "
                "--data: answers of the two do not mix."
            )

    def append(self, record: dict[str, Any]) -> None:
        """Add what a conversation brought; it is on disk when this returns, or ConfigError and nothing of it is."""
        self._write(record)
        self.records[record["key"]] = record

    def _write(self, value: dict[str, Any]) -> None:
        line = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            os.truncate(self.path, self._end)
            raise ConfigError(
                f"{self.path} cannot grow ({error.strerror}). Its {len(self.records)} conversations are kept: make "
                "room and run the same command again."
            ) from error
        self._end += len(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
