"""The typed reader of declared fields: what it takes, and what it says about the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.errors import DrafterMismatchError, WeightsError
from outrider.weights.fields import Fields

NAN, INF = float("nan"), float("inf")
READERS: dict[str, Callable[[Fields], Any]] = {
    "integer": lambda fields: fields.integer("x", low=1, high=8),
    "number": lambda fields: fields.number("x"),
    "boolean": lambda fields: fields.boolean("x"),
    "text": lambda fields: fields.text("x"),
    "integers": lambda fields: fields.integers("x"),
    "texts": lambda fields: fields.texts("x"),
}
GOOD: dict[str, list[Any]] = {
    "integer": [1, 8],
    "number": [1, 2.5, 2**100],
    "boolean": [True, False],
    "text": ["", "a"],
    "integers": [[], [1, -2]],
    "texts": [[], ["a"]],
}
BAD: dict[str, list[Any]] = {
    "integer": [None, 0, 9, 10**30, 2.0, 2.5, NAN, True, "1", [1], {}],
    "number": [None, 0, -1, NAN, INF, 1e300, 10**400, True, "1", [1], {}],
    "boolean": [None, 0, 1, "true", []],
    "text": [None, 1, True, ["a"], {}],
    "integers": [None, 1, True, "12", [1, True], [1.0], ["1"], {}],
    "texts": [None, 1, "ab", ["a", 1], [None], {}],
}


def cases(values: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(kind, value, id=f"{kind}-{value!s:.9}") for kind in values for value in values[kind]]


@pytest.mark.parametrize(("kind", "value"), cases(GOOD))
def test_what_fits_is_returned(kind: str, value: Any) -> None:
    assert READERS[kind](Fields({"x": value}, source="m/config.json")) == value


@pytest.mark.parametrize(("kind", "value"), cases(BAD))
def test_what_does_not_fit_is_named(kind: str, value: Any) -> None:
    with pytest.raises(WeightsError, match=r"^m/config\.json has x=.*; expected (a|true) .*\.$"):
        READERS[kind](Fields({"x": value}, source="m/config.json"))


@pytest.mark.parametrize("kind", READERS)
def test_what_is_absent_is_named(kind: str) -> None:
    with pytest.raises(DrafterMismatchError, match=r"^m/config\.json lacks x; expected "):
        READERS[kind](Fields({}, source="m/config.json", error=DrafterMismatchError))


def test_defaults_stand_for_what_is_absent() -> None:
    fields = Fields({"null": None}, source="m")
    assert fields.integer("x", low=1, default=4) == 4
    assert fields.number("x", default=None) is None
    assert fields.number("null", default=None) is None
    with pytest.raises(WeightsError, match="m has null=None; expected a finite number above 0"):
        fields.number("null", default=1.0)


def test_a_default_has_to_fit_as_well() -> None:
    with pytest.raises(WeightsError, match="m has x=3; expected a whole number from 0 to 2"):
        Fields({}, source="m").integer("x", low=0, high=2, default=3)


def test_tables_name_their_fields_in_full() -> None:
    fields = Fields({"rope": {"full": {"theta": "x"}}, "flat": 1}, source="m")
    with pytest.raises(WeightsError, match=r"m has rope\.full\.theta='x'"):
        fields.table("rope").table("full").number("theta")
    with pytest.raises(WeightsError, match="m has flat=1; expected an object"):
        fields.table("flat")
    with pytest.raises(WeightsError, match="m lacks absent; expected an object"):
        fields.table("absent")
    assert "theta" not in fields.table("absent", optional=True)
    assert "theta" in fields.table("rope").table("full")


def test_a_table_laid_over_wins_except_where_it_is_null() -> None:
    both = Fields({"a": 1, "b": 2, "inner": {"a": 3, "b": None}}, source="m").overlaid("inner")
    assert (both.integer("a", low=0), both.integer("b", low=0)) == (3, 2)


def test_fields_laid_over_a_table_and_defaults() -> None:
    """The outer field wins, then the table's, then the default; a null covers nothing."""
    values = {"a": 1, "b": None, "inner": {"a": 10, "b": 20, "c": None, "d": 40}}
    fields = Fields(values, source="f").underlaid("inner", {"c": 300, "d": 400, "e": 500})
    assert [fields.integer(name, low=0) for name in "abcde"] == [1, 20, 300, 40, 500]
