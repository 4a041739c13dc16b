"""Recipes are read strictly: what a file does not say, or says in vain, is an error that names it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, DrafterMismatchError
from outrider.models.drafter_config import BlockLayout
from outrider.training.config import load_recipe
from tests.training import tiny

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
    assert 1 <= recipe.num_speculative_tokens <= recipe.drafter.max_draft_length
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


@pytest.mark.parametrize(
    ("drafter", "named"),
    [
        ({"full_attention_layers": (2,)}, r"full_attention_layers \[2\] must be below num_layers=2"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"layer_style": "Gemma 3"}, r"layer_style 'Gemma 3' is not one of \['pre-norm', 'Gemma 4'\]"),
        ({"layer_style": "Gemma 4"}, "needs every layer among full_attention_layers"),
        ({"markov_head_type": "deep"}, "markov_head_type 'deep' is not one of"),
        ({"confidence_head_with_markov": True}, "confidence_head_with_markov needs a markov_rank"),
        ({"block_size": 1}, "block_size=1 leaves nothing to draft"),
    ],
)
def test_shapes_that_cannot_be_are_refused(drafter: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"recipe tiny, \[drafter\]: .*{named}"):
        tiny.trainer(tiny.recipe(drafter=drafter))


@pytest.mark.parametrize(
    ("drafter", "named"),
    [({"target_layer_ids": (0, 3)}, r"target_layer_ids \[0, 3\]"), ({"mask_token_id": 100}, "mask")],
)
def test_drafters_that_do_not_fit_the_target_are_refused(drafter: dict[str, Any], named: str) -> None:
    with pytest.raises(DrafterMismatchError, match=rf"drafter tiny does not fit target .*{named}"):
        tiny.trainer(tiny.recipe(drafter=drafter))


def test_keys_with_a_default_may_be_left_out_and_losses_say_what_they_need(tmp_path: Path) -> None:
    recipe = load_recipe(edited(tmp_path / "recipe.toml", "is_causal = true", ""))
    assert recipe.drafter.is_causal is None
    assert recipe.drafter.layout is BlockLayout.SAME_POSITION
    assert recipe.optimize.needs_teacher
    assert recipe.tap_layers(18) == (12, 15, 16, 17)
    plain = replace(recipe.optimize, distillation_weight=0.0)
    assert not plain.needs_teacher
    for name in ("probability_l1_weight", "hidden_l1_weight"):
        assert replace(plain, **{name: 0.5}).needs_teacher
