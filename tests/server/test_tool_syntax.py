"""Gemma's spelling of values, and back: whatever is spelled is read again, in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.tool_syntax import QUOTE, ArgumentStream, spell, spell_fields

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda text: QUOTE not in text)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=4)


def read(text: str, size: int = 10_000) -> tuple[list[str], ArgumentStream]:
    """JSON pieces of what follows the opening brace, taken in pieces of so many characters."""
    stream, pieces = ArgumentStream(), []
    for number, part in enumerate(text.split(QUOTE)):
        if number:
            stream.quote()
        for start in range(0, len(part), size):
            stream.push(part[start : start + size])
            pieces.append(stream.take())
    pieces.append(stream.take())
    return pieces, stream


def test_spelling() -> None:
    value = {"b": "x\ny", "A": [1, -2.5, True, None], "c": {"d": {}}}
    assert spell(value) == '{A:[1,-2.5,true,null],b:<|"|>x\ny<|"|>,c:{d:{}}}'
    assert spell('a<|"|>b') == '<|"|>a"b<|"|>'
    assert spell_fields({"a b": 1, "a:b": 2}) == 'a b:1,<|"|>a:b<|"|>:2'


@given(ARGUMENTS, st.integers(1, 5))
def test_what_is_spelled_is_read(arguments: dict[str, Any], size: int) -> None:
    pieces, stream = read(spell_fields(arguments) + "}", size)
    assert stream.is_complete
    assert json.loads("".join(pieces)) == arguments


@given(st.text('{}[]:,"ab1 \\\n', max_size=30), st.integers(1, 5))
def test_pieces_do_not_depend_on_the_cut_and_completion_is_json(text: str, size: int) -> None:
    whole, pieces = read(text), read(text, size)
    assert "".join(whole[0]) == "".join(pieces[0])
    assert whole[1].is_complete == pieces[1].is_complete
    stream = pieces[1]
    if not stream.is_complete:
        stream.complete()
    json.loads("".join(pieces[0]) + stream.take())


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("}", {}),
        ('city:"Oslo",days:3}', {"city": "Oslo", "days": 3}),
        ('"a": "b\\"c\\n\\\\", "d": 1}', {"a": 'b"c\n\\', "d": 1}),
        ('a:"bad\\q"}', {"a": "bad\\q"}),
        ("a:None,b:nan,c:007,d:x y}", {"a": None, "b": "nan", "c": "007", "d": "x y"}),
        ("a:[1,2,],b:{},}", {"a": [1, 2], "b": {}}),
        ("a:}", {"a": None}),
        ('<|"|> k <|"|> :1}', {" k ": 1}),
        ('a:x<|"|>y}', {"a": 'x<|"|>y'}),
    ],
)
def test_what_models_write_beside(text: str, arguments: dict[str, Any]) -> None:
    pieces, stream = read(text)
    assert stream.is_complete
    assert json.loads("".join(pieces)) == arguments


def test_strings_are_streamed() -> None:
    pieces, _ = read('a:<|"|>one two three<|"|>}', 4)
    assert [piece for piece in pieces if piece] == ['{"a":', '"one ', "two ", "thre", "e", '"}']


def test_reading_stops_at_the_closing_brace() -> None:
    stream = ArgumentStream()
    assert stream.push("a:1} and more") == 4


@pytest.mark.parametrize("text", ["", "a", "a:", "a:1", "a:tr", 'a:<|"|>x', "a:[1,{b:", 'a:"x', "a:1,"])
def test_completion(text: str) -> None:
    pieces, stream = read(text)
    stream.complete()
    assert isinstance(json.loads("".join(pieces) + stream.take()), dict)
