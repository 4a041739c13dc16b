"""T-075: every option of the forward pass reaches the config of each layout that can say it.

The consumer here is a stub that knows the written contracts alone: which key holds which option, and how ids count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.models.drafter_config import BlockLayout, DrafterConfig
from tests.training.test_drafter_layouts import DSPARK, SPECULATORS, UNSCALED, ZLAB, written

Config = dict[str, Any]


def zlab(config: Config) -> Config:
    """formats.md §2.1 and §2.2."""
    kinds, nested = config["layer_types"], config["dflash_config"]
    by_kind = [kind == "sliding_attention" for kind in kinds]
    return {
        "taps": nested["target_layer_ids"],
        "mask": nested["mask_token_id"],
        "scale": nested.get("input_embedding_scale"),
        "causal": [config["is_causal"]] * len(kinds) if "is_causal" in config else by_kind,
        "window": config["sliding_window"],
        "cap": config.get("final_logit_softcapping"),
        "drafts": config["block_size"] - 1,
        "vocabulary": config.get("draft_vocab_size", config["vocab_size"]),
    }


def speculators(config: Config) -> Config:
    """formats.md §2.5: ids are one higher, nothing is scaled or capped, sliding layers are causal unless said not."""
    layers, drops = config["transformer_layer_config"], 0 if config["sample_from_anchor"] else 1
    two_way = config["sliding_window_non_causal"]
    return {
        "taps": [layer_id - 1 for layer_id in config["aux_hidden_state_layer_ids"]],
        "mask": config["mask_token_id"],
        "scale": 1.0,
        "causal": [kind == "sliding_attention" and not two_way for kind in layers["layer_types"]],
        "window": layers["sliding_window"],
        "cap": None,
        "drafts": config["block_size"] - drops,
        "vocabulary": config["draft_vocab_size"],
    }


def deepspec(config: Config) -> Config:
    """formats.md §3.1 and §3.5: embeddings are scaled by the model, every slot predicts."""
    return {
        "taps": config["target_layer_ids"],
        "mask": config["mask_token_id"],
        "scale": None,
        "causal": [config.get("is_causal", False)] * len(config["layer_types"]),
        "window": None,
        "cap": config["final_logit_softcapping"],
        "drafts": config["block_size"],
        "vocabulary": config["vocab_size"],
    }


@pytest.mark.parametrize(
    ("layout", "drafter", "consumer"),
    [
        ("z-lab", ZLAB, zlab),
        ("z-lab", replace(ZLAB, layer_is_causal=(True, False)), zlab),
        ("z-lab", replace(ZLAB, layer_is_causal=(False, False), embedding_scale=3.0), zlab),
        ("outrider", replace(ZLAB, draft_vocab_size=64), zlab),
        ("vllm", UNSCALED, zlab),
        ("speculators", SPECULATORS, speculators),
        ("speculators", replace(SPECULATORS, layer_is_causal=(False, False)), speculators),
        ("speculators", replace(SPECULATORS, layout=BlockLayout.NEXT_POSITION), speculators),
        ("deepspec", DSPARK, deepspec),
        ("deepspec", replace(DSPARK, layer_is_causal=(True, True)), deepspec),
        ("vllm", DSPARK, deepspec),
    ],
)
def test_a_consumer_reads_every_option(
    layout: str, drafter: DrafterConfig, consumer: Callable[[Config], Config]
) -> None:
    windows = [spec.window for spec in drafter.layers if spec.window is not None]
    assert consumer(written(layout, drafter)) == {
        "taps": list(drafter.target_layer_ids),
        "mask": drafter.mask_token_id,
        "scale": drafter.embedding_scale,
        "causal": list(drafter.layer_is_causal),
        "window": windows[0] if windows else None,
        "cap": drafter.final_logit_softcapping,
        "drafts": drafter.max_draft_length,
        "vocabulary": drafter.draft_vocab_size,
    }
