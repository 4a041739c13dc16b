"""Recipes are read strictly: what a file does not say, or says in vain, is an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.training.config import load_recipe

SHIPPED = Path(__file__).resolve().parents[2] / "recipes" / "gemma3-270m-dflash.toml"


def edited(path: Path, old: str, new: str) -> Path:
    source = SHIPPED.read_text(encoding="utf-8")
    assert source.count(old) == 1
    path.write_text(source.replace(old, new), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted(SHIPPED.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_load(path: Path) -> None:
    recipe = load_recipe(path)
    assert path.stem.startswith(recipe.name)
    assert 1 <= recipe.num_speculative_tokens < recipe.drafter.block_size
    assert isinstance(recipe.drafter.target_layer_ids, tuple)
    hash(recipe)  # frozen through and through


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("filtered_top_p = 0.95", "", "filtered_top_p"),
        ("head_dim = 64", "head_dimension = 64", "head_dimension"),
        ("clip_norm = 1.0", "clip_norm = 1.0\nmomentum = 0.9", "momentum"),
        ("num_speculative_tokens = 3", "", "num_speculative_tokens"),
        ("[optimize]", "[optimise]", "optimise"),
    ],
)
def test_missing_and_unknown_keys_are_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named if named != "optimise" else r"\[optimize\]"):
        load_recipe(edited(tmp_path / "recipe.toml", old, new))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_recipe(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("name = ")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_recipe(tmp_path / "broken.toml")
