from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.backends.dummy_configs import (
    DUMMY_NAMES,
    dummy_drafter_config,
    dummy_target_config,
    write_dummy_configs,
)
from outrider.errors import ConfigError


def test_a_size_that_is_not_known_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'70b'.*31b, 26b-a4b, tiny"):
        dummy_target_config("70b")
    with pytest.raises(ConfigError, match="70b"):
        dummy_drafter_config("70b")


@pytest.mark.parametrize("name", DUMMY_NAMES)
def test_configs_are_written_for_engines_that_read_directories(name: str, tmp_path: Path) -> None:
    target, drafter = write_dummy_configs(name, tmp_path)
    assert json.loads((target / "config.json").read_text()) == dummy_target_config(name)
    assert json.loads((drafter / "config.json").read_text()) == dummy_drafter_config(name)


def test_what_one_caller_changes_no_other_sees() -> None:
    dummy_target_config("tiny")["hidden_size"] = 1
    assert dummy_target_config("tiny")["hidden_size"] == 256
    dummy_drafter_config("tiny").pop("dflash_config")
    assert dummy_drafter_config("tiny")["dflash_config"]["target_layer_ids"] == [1, 3]
