"""What shared options turn their text into."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.options import parsed_rates
from outrider.errors import ConfigError


def test_rates_are_numbers_with_commas_between() -> None:
    assert parsed_rates(None) is None
    assert parsed_rates("0.9, 0.5,0") == (0.9, 0.5, 0.0)
    for text in ("", "0.9;0.5", "0.9,"):
        with pytest.raises(ConfigError, match=f"--synthetic-acceptance-rates '{text}'"):
            parsed_rates(text)


@pytest.mark.parametrize("command", [["generate", "x"], ["demo"], ["explain", "--gpu-memory-gib", "24"]])
def test_the_drafters_quantization_reaches_loading(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--drafter-quantization", "int3"])
    assert isinstance(shown.exception, ConfigError)
    assert "drafter_quantization='int3' is unknown; choose one of int8, int4" in str(shown.exception)
