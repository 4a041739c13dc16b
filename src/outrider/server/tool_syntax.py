"""Gemma 4's spelling of tool arguments, both ways: values to text, and a growing text to JSON.

A call is `call:NAME{key:value,…}`: keys bare, strings between two `<|"|>`, numbers, booleans and null bare, objects and
lists nested. There are no escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

QUOTE = '<|"|>'
_BARE_KEY = re.compile(r'[^\s:{}\[\],"<>](?:[^:{}\[\],"<>]*[^\s:{}\[\],"<>])?')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}  # a template in Jinja writes None
_END_OF_BARE = re.compile(r"[,}\]]")


def spell(value: Any) -> str:
    """A JSON value in Gemma's spelling, keys sorted as its own template sorts them."""
    if isinstance(value, str):
        return QUOTE + value.replace(QUOTE, '"') + QUOTE
    if isinstance(value, Mapping):
        return "{" + spell_fields(value) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(spell(each) for each in value) + "]"
    return json.dumps(value)


def spell_fields(fields: Mapping[str, Any]) -> str:
    """`key:value,…` without braces."""
    ordered = sorted(fields.items(), key=lambda item: item[0].lower())
    return ",".join(f"{key if _BARE_KEY.fullmatch(key) else spell(key)}:{spell(value)}" for key, value in ordered)


class _Mode(Enum):
    KEY = auto()
    QUOTED_KEY = auto()
    KEY_END = auto()
    VALUE = auto()
    STRING = auto()
    JSON_STRING = auto()
    BARE = auto()
    AFTER = auto()


class ArgumentStream:
    """Turns what follows `call:NAME{` into JSON as it comes; the pieces do not depend on how the text is cut.

    `push` takes text between string delimiters, `quote` one delimiter. JSON's own strings are understood as well.
    """

    def __init__(self) -> None:
        self.is_complete = False
        """True once the brace that closes the arguments was read."""
        self._open = ["}"]  # what closes each open container
        self._counts = [0]  # entries of each
        self._mode = _Mode.KEY
        self._held = ""  # a key, a bare word or a JSON string, until its end is known
        self._json = ["{"]

    def take(self) -> str:
        """JSON text that became certain since the last call."""
        text = "".join(self._json)
        self._json.clear()
        return text

    def push(self, text: str) -> int:
        """Read text up to its end or to the end of the arguments; returns how many characters that were."""
        at = 0
        while at < len(text) and not self.is_complete:
            if self._mode is _Mode.STRING:
                self._json.append(_escaped(text[at:]))
                return len(text)
            self._read(text[at])
            at += 1
        return at

    def quote(self) -> None:
        """Read a string delimiter."""
        if self._mode is _Mode.VALUE:
            self._begin_value()
            self._json.append('"')
            self._mode = _Mode.STRING
        elif self._mode is _Mode.STRING:
            self._json.append('"')
            self._mode = _Mode.AFTER
        elif self._mode is _Mode.KEY:
            self._held, self._mode = "", _Mode.QUOTED_KEY
        elif self._mode is _Mode.QUOTED_KEY:
            self._mode = _Mode.KEY_END
        elif self._mode in (_Mode.BARE, _Mode.JSON_STRING):
            self._held += QUOTE

    def complete(self) -> None:
        """Close whatever is open: the call was ended on purpose, though braces are missing."""
        if self._mode is _Mode.STRING:
            self._json.append('"')
        elif self._mode in (_Mode.BARE, _Mode.JSON_STRING):
            self._end_held()
        elif self._mode is _Mode.VALUE and self._open[-1] == "}":
            self._json.append("null")
        self._json.append("".join(reversed(self._open)))
        self.is_complete = True

    def _read(self, char: str) -> None:
        if self._mode in (_Mode.KEY, _Mode.KEY_END):
            self._read_key(char)
        elif self._mode is _Mode.QUOTED_KEY:
            self._held += char
        elif self._mode is _Mode.VALUE:
            self._read_value(char)
        elif self._mode is _Mode.JSON_STRING:
            self._held += char
            if char == '"' and not _is_escaped(self._held):
                self._end_held()
        elif self._mode is _Mode.BARE and not _END_OF_BARE.match(char):
            self._held += char
        else:
            if self._mode is _Mode.BARE:
                self._end_held()
            self._read_after(char)

    def _read_key(self, char: str) -> None:
        if char == ":":
            key, self._held = self._held, ""
            if self._mode is _Mode.KEY:
                key = key.strip()
                key = key[1:-1] if len(key) > 1 and key[0] == key[-1] == '"' else key
            self._separate()
            self._json.append(json.dumps(key, ensure_ascii=False) + ":")
            self._mode = _Mode.VALUE
        elif char == "}":
            self._close()
        elif self._mode is _Mode.KEY and (char != "," or self._held):
            self._held += char

    def _read_value(self, char: str) -> None:
        if char.isspace() or char == ",":
            return
        if char in "}]":
            if self._open[-1] == "}":
                self._json.append("null")
            self._close()
            return
        self._begin_value()
        if char in "{[":
            self._json.append(char)
            self._open.append("}" if char == "{" else "]")
            self._counts.append(0)
            self._mode = _Mode.KEY if char == "{" else _Mode.VALUE
        else:
            self._held, self._mode = char, _Mode.JSON_STRING if char == '"' else _Mode.BARE

    def _read_after(self, char: str) -> None:
        if char in "}]":
            self._close()
        elif char == ",":
            self._mode = _Mode.KEY if self._open[-1] == "}" else _Mode.VALUE

    def _begin_value(self) -> None:
        if self._open[-1] == "]":
            self._separate()

    def _separate(self) -> None:
        if self._counts[-1]:
            self._json.append(",")
        self._counts[-1] += 1

    def _end_held(self) -> None:
        held, self._held = self._held.strip(), ""
        self._json.append(_json_of(held))
        self._mode = _Mode.AFTER

    def _close(self) -> None:
        """The innermost container ends, whichever bracket was written."""
        self._held, self._mode = "", _Mode.AFTER
        self._json.append(self._open.pop())
        self._counts.pop()
        self.is_complete = not self._open


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_escaped(text: str) -> bool:
    """True where the last character follows an odd number of backslashes."""
    before = text[:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _json_of(held: str) -> str:
    """A bare word or a JSON string as JSON; what is neither becomes a string."""
    if held in _WORDS:
        return _WORDS[held]
    if _NUMBER.fullmatch(held):
        return held
    if held.startswith('"'):
        try:
            return json.dumps(json.loads(held, strict=False), ensure_ascii=False)
        except ValueError:
            held = held.strip('"')
    return json.dumps(held, ensure_ascii=False)
