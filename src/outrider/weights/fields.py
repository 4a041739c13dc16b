"""Read declared fields (config.json, GGUF metadata) by type and range: whatever else stands there is a named error."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from outrider.errors import OutriderError, WeightsError

T = TypeVar("T")
V = TypeVar("V")

_REQUIRED: Any = object()
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38


class Fields:
    """The fields of one table of one file. Every reader raises `error`, naming file, field, value and expectation.

    An absent field is its default, or an error where there is none. A null counts as absent only where the default is
    None: nobody can know what null means for a window or a norm.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        source: Path | str,
        error: type[OutriderError] = WeightsError,
        prefix: str = "",
    ) -> None:
        self._values = values
        self.source = source
        self._error = error
        self._prefix = prefix

    def integer(self, name: str, *, low: int, high: int = _INT32_MAX, default: T = _REQUIRED) -> int | T:
        """A whole number from `low` to `high`."""
        expected = f"a whole number from {low} " + (f"to {high}" if high < _INT32_MAX else "upwards")
        return self._read(name, int, expected, default, lambda value: low <= value <= high)

    def number(self, name: str, *, high: float = _FLOAT32_MAX, default: T = _REQUIRED) -> float | T:
        """A finite number above 0, whole or not: none that a config declares can be 0 or less."""
        expected = "a finite number above 0" if high == _FLOAT32_MAX else f"a number above 0 and at most {high:g}"
        value = self._read(name, float, expected, default, lambda value: 0 < value <= high)
        return float(value) if isinstance(value, (int, float)) else value

    def boolean(self, name: str, *, default: T = _REQUIRED) -> bool | T:
        """True or false."""
        return self._read(name, bool, "true or false", default)

    def text(self, name: str, *, default: T = _REQUIRED) -> str | T:
        """A string."""
        return self._read(name, str, "a string", default)

    def integers(self, name: str, *, default: T = _REQUIRED) -> list[int] | T:
        """A list of whole numbers of any size."""
        return self._read(name, list, "a list of whole numbers", default, lambda value: _all_are(int, value))

    def texts(self, name: str, *, default: T = _REQUIRED) -> list[str] | T:
        """A list of strings."""
        return self._read(name, list, "a list of strings", default, lambda value: _all_are(str, value))

    def table(self, name: str, *, optional: bool = False) -> Fields:
        """The table `name`; an optional one is empty where it is absent or null."""
        values = self._read(name, dict, "an object", None if optional else _REQUIRED)
        return Fields(values or {}, source=self.source, error=self._error, prefix=f"{self._prefix}{name}.")

    def overlaid(self, name: str) -> Fields:
        """These fields with those of the table `name` laid over them, except nulls."""
        return self._with({**self._values, **self.table(name, optional=True)._stated})

    def underlaid(self, name: str, defaults: Mapping[str, Any]) -> Fields:
        """These fields laid over those of the table `name`, and those over `defaults`; nulls cover nothing."""
        return self._with({**defaults, **self.table(name)._stated, **self._stated})

    @property
    def _stated(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if value is not None}

    def _with(self, values: Mapping[str, Any]) -> Fields:
        return Fields(values, source=self.source, error=self._error, prefix=self._prefix)

    def __contains__(self, name: str) -> bool:
        """True for a field that is there and not null."""
        return self._values.get(name) is not None

    def is_list(self, name: str) -> bool:
        """True for a field that holds a list, whatever is in it."""
        return isinstance(self._values.get(name), list)

    def _read(
        self, name: str, kind: type[V], expected: str, default: T, accepts: Callable[[V], bool] | None = None
    ) -> V | T:
        value = self._values.get(name, default)
        if value is None and default is None:
            return default
        if value is _REQUIRED:
            raise self._error(f"{self.source} lacks {self._prefix}{name}; expected {expected}.")
        if not _is(kind, value) or (accepts and not accepts(value)):
            raise self._error(f"{self.source} has {self._prefix}{name}={reprlib.repr(value)}; expected {expected}.")
        return cast(V, value)


def _is(kind: type, value: Any) -> bool:
    """As JSON has it: true is no number, and 2 is as good as 2.0 where any number will do."""
    accepted = (int, float) if kind is float else kind
    return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))


def _all_are(kind: type, values: list[Any]) -> bool:
    return all(_is(kind, value) for value in values)
