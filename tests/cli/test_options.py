"""What shared options turn their text into."""

from __future__ import annotations

import pytest

from outrider.cli.options import parsed_rates
from outrider.errors import ConfigError


def test_rates_are_numbers_with_commas_between() -> None:
    assert parsed_rates(None) is None
    assert parsed_rates("0.9, 0.5,0") == (0.9, 0.5, 0.0)
    for text in ("", "0.9;0.5", "0.9,"):
        with pytest.raises(ConfigError, match=f"--synthetic-acceptance-rates '{text}'"):
            parsed_rates(text)
