from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.errors import ConfigError


def test_a_table_of_parts_and_exit_code_0() -> None:
    shown = CliRunner().invoke(app, ["explain", "--target", "31b", "--gpu-memory-gib", "141"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "31b and 31b-dflash" in shown.stdout
    assert "drafter: projection of taps" in shown.stdout
    assert "65.2" in next(line for line in shown.stdout.splitlines() if "weights and caches" in line)


def test_what_does_not_fit_exits_1_and_says_so() -> None:
    shown = CliRunner().invoke(
        app, ["explain", "--target", "31b", "--gpu-memory-gib", "24", "--no-drafter", "--max-seats", "2", "--json"]
    )
    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert (found["fits"], found["drafter"], found["max_seats"]) == (False, None, 2)


@pytest.mark.parametrize("given", [["--gpu-memory-gib", "0"], ["--gpu-memory-gib", "-3"]])
def test_memory_that_is_none_is_refused(given: list[str]) -> None:
    shown = CliRunner().invoke(app, ["explain", "--target", "tiny", *given])
    assert isinstance(shown.exception, ConfigError)
