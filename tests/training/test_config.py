"""Recipes are read strictly: what a file does not say, or says in vain, is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.training.config import load_recipe

PLANS = Path(__file__).resolve().parents[1] / "golden" / "name_plans"
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
    ("recipe", "plan", "dimensions"),
    [
        ("e4b", "gemma-4-E4B-it", None),
        ("12b", "gemma-4-12B-it", None),
        ("26b-a4b", "gemma-4-26B-A4B-it", "gemma-4-26B-A4B-it-DFlash"),
        ("31b", "gemma-4-31B-it", "gemma-4-31B-it-DFlash"),
    ],
)
def test_recipes_of_gemma_4_fit_their_targets(recipe: str, plan: str, dimensions: str | None) -> None:
    """Taps lie where z-lab puts them, 1 + i(L - 4) / 5; texts fit the window; sizes are the published drafter's."""
    found = load_recipe(SHIPPED.parent / f"gemma4-{recipe}-dflash.toml")
    target = json.loads((PLANS / plan / "config.json").read_text())["text_config"]
    num_layers = target["num_hidden_layers"]
    taps = tuple(round(1 + i * (num_layers - 4) / 5) for i in range(6))
    assert found.drafter.target_layer_ids == taps
    assert found.generate.sequence_tokens <= target["sliding_window"]
    assert found.drafter.draft_vocab_size <= target["vocab_size"]
    if dimensions is not None:
        published = json.loads((PLANS / dimensions / "config.json").read_text())
        same = {
            "num_hidden_layers": found.drafter.num_layers,
            "num_attention_heads": found.drafter.num_heads,
            "num_key_value_heads": found.drafter.num_kv_heads,
            "head_dim": found.drafter.head_dim,
            "intermediate_size": found.drafter.intermediate_size,
            "block_size": found.drafter.block_size,
            "mask_token_id": found.drafter.mask_token_id,
            "target_layer_ids": list(taps),
            "sliding_window": found.drafter.sliding_window,
            "rope_theta": found.drafter.rope_theta,
        }
        assert {key: published[key] for key in same} == same


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
