"""The exception tree: every error a user can cause is an OutriderError with an exit code."""

from __future__ import annotations

import inspect

import pytest

from outrider import errors

ALL_ERRORS = [member for _, member in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: error.__name__)
def test_every_error_is_ours_and_documented(error: type[Exception]) -> None:
    assert issubclass(error, errors.OutriderError)
    assert error.__doc__
    assert str(error("names the thing")) == "names the thing"


def test_what_the_user_got_wrong_exits_2_and_what_we_got_wrong_exits_1() -> None:
    exit_codes = {error.__name__: error.exit_code for error in ALL_ERRORS}
    assert (exit_codes.pop("EngineFault"), exit_codes.pop("DrafterFault")) == (1, 1)
    assert set(exit_codes.values()) == {2}
