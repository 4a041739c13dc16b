"""Training goes on from a drafter that is there: its own numbers and vocabulary, and nothing that does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import DrafterMismatchError
from outrider.training.config import Recipe
from outrider.training.export import export_drafter
from outrider.training.trainer import Trainer
from outrider.training.warm_start import load_warm_start
from tests.training import tiny

GEMMA4 = {"layer_style": "Gemma 4", "full_attention_layers": (0, 1), "sliding_window": 0, "rope_rotated": 0.25}
FULL = {"draft_vocab_size": tiny.VOCAB, "is_causal": None}


def started(path: Path, recipe: Recipe, *, counts: Tensor | None = None) -> Trainer:
    target = tiny.target()
    declared = recipe.drafter.declared(target.config, name=recipe.name, num_speculative_tokens=1)
    start = load_warm_start(path, declared, target)
    return Trainer(recipe, target, torch.arange(tiny.VOCAB) if counts is None else counts, start=start)


def write(path: Path, trainer: Trainer, config: dict[str, Any], **more: Tensor) -> Path:
    """A drafter as another trainer writes it: bfloat16 or float32 numbers and its own config."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {**{name: each.clone() for name, each in trainer.model.state_dict().items()}, **more},
        path / "model.safetensors",
    )
    return path


def common(recipe: Recipe) -> dict[str, Any]:
    shape = recipe.drafter
    return {
        "hidden_size": tiny.HIDDEN,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": tiny.VOCAB,
        "num_target_layers": tiny.NUM_LAYERS,
        "block_size": shape.block_size,
        "mask_token_id": tiny.MASK_ID,
        "target_layer_ids": list(shape.target_layer_ids),
        "rms_norm_eps": 1e-6,
    }


def same(one: Trainer, other: Trainer, *, but: str = "nothing") -> bool:
    theirs = other.model.state_dict()
    return all(torch.equal(values, theirs[name]) for name, values in one.model.state_dict().items() if but not in name)


def test_z_labs_backbone_with_a_new_head_drafts_as_before(tmp_path: Path) -> None:
    """Seed 001: a Markov head on z-lab's drafter, blocks of another size; nothing is lost at the start."""
    recipe = tiny.recipe(drafter={**FULL, "full_attention_layers": (1,), "rope_theta": 1e6})
    old = tiny.trainer(recipe)
    config = common(recipe) | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "rope_theta": 1e6}
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "hidden_act": "silu"}
    path = write(tmp_path / "z-lab", old, config)
    extended = replace(recipe, drafter=replace(recipe.drafter, markov_rank=8, block_size=6))
    new = started(path, extended)
    assert same(old, new)
    taps, token_ids = torch.randn(1, 20, 2 * tiny.HIDDEN), tiny.text(1).token_ids.long()
    drafts = [each.draft_logits(taps, token_ids, torch.tensor([[5, 9]]), block_size=4) for each in (old, new)]
    torch.testing.assert_close(drafts[0], drafts[1])
    assert tiny.step(new, tiny.text()).loss.isfinite()


def test_deepspecs_gemma4_drafter_with_its_heads_and_copied_tables(tmp_path: Path) -> None:
    recipe = tiny.dspark_recipe(drafter={**FULL, **GEMMA4, "rope_theta": 1e6, "final_logit_softcapping": 30.0})
    old = tiny.trainer(recipe)
    config = common(recipe) | {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}
    config |= {"layer_types": ["full_attention"] * 2, "sliding_window": 512, "global_head_dim": 16}
    config |= {"num_global_key_value_heads": 2, "attention_k_eq_v": True, "final_logit_softcapping": 30.0}
    config |= {"rope_parameters": {kind: {"rope_theta": theta, **more} for kind, theta, more in ROPES}}
    config |= {"markov_rank": 32, "enable_confidence_head": True, "confidence_head_with_markov": True}
    table = old.target.embedding.to(torch.bfloat16).float()
    path = write(tmp_path / "deepspec", old, config, **{"embed_tokens.weight": table, "lm_head.weight": table.clone()})
    assert same(old, started(path, recipe))
    stranger = torch.randn(table.shape, generator=torch.Generator().manual_seed(9))
    other = write(tmp_path / "other", old, config, **{"embed_tokens.weight": table, "lm_head.weight": stranger})
    with pytest.raises(DrafterMismatchError, match=r"other: lm_head.weight is not the target's own table"):
        started(other, recipe)


ROPES = (
    ("full_attention", 1e6, {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
    ("sliding_attention", 1e4, {"rope_type": "default"}),
)


def test_our_own_drafter_brings_its_vocabulary(tmp_path: Path) -> None:
    recipe = tiny.recipe()
    old = tiny.trainer(recipe)
    export_drafter(old, tmp_path / "ours", record={})
    new = started(tmp_path / "ours", recipe)  # counts that would choose other tokens
    assert torch.equal(new.draft_to_target, old.draft_to_target)
    assert torch.equal(new.head.matrix, old.head.matrix)
    for name, values in old.model.state_dict().items():  # int8 groups round, and no more
        torch.testing.assert_close(new.model.state_dict()[name], values, atol=0.02 * float(values.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("drafter", "named"),
    [
        ({"is_causal": False}, r"layer_is_causal is \(True, True\) there, \(False, False\) here"),
        ({"target_layer_ids": (1, 2)}, r"target_layer_ids is \(0, 2\) there, \(1, 2\) here"),
        ({"sample_from_anchor": True}, "layout is .* there"),
        ({"scale_block_embeddings": False}, "embedding_scale is None there, 1.0 here"),
        ({"draft_vocab_size": 50}, "draft_vocab_size is 64 there, 50 here"),
    ],
)
def test_another_drafter_than_the_recipes_is_refused_by_field(
    drafter: dict[str, Any], named: str, tmp_path: Path
) -> None:
    export_drafter(tiny.trainer(tiny.recipe()), tmp_path / "ours", record={})
    with pytest.raises(DrafterMismatchError, match=rf"ours is another drafter than the recipe's: .*{named}"):
        started(tmp_path / "ours", tiny.recipe(drafter=drafter))


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    recipe = tiny.recipe(drafter={"draft_vocab_size": tiny.VOCAB, "full_attention_layers": (0, 1)})
    config = common(recipe) | {"architectures": ["DFlashDraftModel"], "is_causal": True, "rope_theta": 1e4}
    trainer = tiny.trainer(recipe)
    whole = write(tmp_path / "spare", trainer, config, **{"layers.2.mlp.up_proj.weight": torch.ones(2, 2)})
    with pytest.raises(DrafterMismatchError, match=r"1 tensors have no place .* layers.2.mlp.up_proj.weight"):
        started(whole, recipe)
    del trainer.model.hidden_norm
    with pytest.raises(DrafterMismatchError, match=r"needs hidden_norm.weight \[32\], the drafter lacks it"):
        started(write(tmp_path / "lacking", trainer, config), recipe)
