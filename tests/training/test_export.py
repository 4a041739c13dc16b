"""What was trained is what is served: names, config and numbers of the exported file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.kernels.reference import TorchKernels
from outrider.models.attention import allocate_caches
from outrider.models.dflash import DFlashDrafter
from outrider.models.draft_layers import BlockRows
from outrider.models.registry import load_drafter
from outrider.training.capture import GridRunner
from outrider.training.export import export_drafter
from outrider.training.trainer import Trainer
from tests.toy import block_logits
from tests.training import tiny

NUM_POSITIONS = 20
ANCHORS = torch.tensor([[0, 1, 6, 7, 13, 19]])


def load_back(trainer: Trainer, file: Path) -> None:
    """Give the trainable model the numbers of the exported file."""
    stored = load_file(file)
    state = {}
    for name in trainer.model.state_dict():
        values, scales = stored[name], stored.get(f"{name}_scale")
        if scales is not None:
            values = (values.view(len(values), -1, 32) * scales.float()[..., None]).flatten(1)
        state[name] = values
    trainer.model.load_state_dict(state)


def served_logits(drafter: DFlashDrafter, taps: Tensor, token_ids: Tensor, anchors: Tensor) -> Tensor:
    """Logits [A, B - 1, Vd] of the engine's drafter: one seat an anchor, context written as a prompt is."""
    num_anchors, block_size = len(anchors), drafter.config.block_size
    caches = allocate_caches(
        drafter.config.layers,
        num_seats=num_anchors,
        context_length=NUM_POSITIONS,
        max_rows=NUM_POSITIONS,
        dtype=torch.float32,
        device="cpu",
    )
    for seat, anchor in enumerate(anchors.tolist()):
        if anchor > 0:
            drafter.write_context(taps[:anchor], torch.full((anchor,), seat), torch.arange(anchor), caches)
    slots = torch.full((num_anchors, block_size), drafter.config.mask_token_id)
    slots[:, 0] = token_ids[anchors]
    return block_logits(drafter, BlockRows(slots.flatten(), torch.arange(num_anchors), anchors, block_size), caches)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("draft_vocab_size", [64, tiny.VOCAB])
@torch.no_grad()
def test_the_engine_drafts_what_the_trainer_trained(tmp_path: Path, is_causal: bool, draft_vocab_size: int) -> None:
    """The joining test of the two forward passes (T-074, T-075): window, mask, taps, scale, vocabulary."""
    drafter = {"is_causal": is_causal, "draft_vocab_size": draft_vocab_size, "sliding_window": 6}
    trainer = tiny.trainer(tiny.recipe(drafter=drafter), on=tiny.target(norm_offset=1.0))
    export_drafter(trainer, tmp_path / "tiny", record={})
    token_ids = tiny.text(1, num_positions=NUM_POSITIONS).token_ids.long()
    runner = GridRunner(trainer.target, num_sequences=1, num_positions=NUM_POSITIONS)
    taps = runner.taps(token_ids, trainer.recipe.drafter.target_layer_ids)
    before = trainer.draft_logits(taps, token_ids, ANCHORS, block_size=4)[0]
    load_back(trainer, tmp_path / "tiny" / "model.safetensors")
    trained = trainer.draft_logits(taps, token_ids, ANCHORS, block_size=4)[0]
    serving = tiny.target(kernels=TorchKernels(torch.float32), norm_offset=1.0)
    loaded = load_drafter(tmp_path / "tiny", serving, target_name="tiny", context_length=NUM_POSITIONS)
    served = served_logits(loaded, taps[0], token_ids[0], ANCHORS[0])
    torch.testing.assert_close(served, trained, atol=1e-4, rtol=1e-4)
    assert (served - before).abs().max() < 0.1 * before.std()  # int8 rounds, and no more
    ids = torch.arange(draft_vocab_size) if loaded.draft_to_target is None else loaded.draft_to_target
    assert torch.equal(ids, trainer.draft_to_target)
    assert loaded.config.num_speculative_tokens == trainer.recipe.num_speculative_tokens


def test_names_and_types_are_the_written_contract(tmp_path: Path) -> None:
    """T-075: checked against a list, not against the reading rule. Embedding and head are the target's."""
    export_drafter(tiny.trainer(tiny.recipe()), tmp_path, record={})
    stored = load_file(tmp_path / "model.safetensors")
    matrices = {"fc"}
    norms = {"hidden_norm", "norm"}
    for layer in ("layers.0", "layers.1"):
        matrices |= {f"{layer}.self_attn.{part}_proj" for part in "qkvo"}
        matrices |= {f"{layer}.mlp.{part}_proj" for part in ("gate", "up", "down")}
        norms |= {f"{layer}.{place}_layernorm" for place in ("input", "post_attention")}
        norms |= {f"{layer}.self_attn.{part}_norm" for part in "qk"}
    kinds = {f"{name}.weight": torch.int8 for name in matrices}
    kinds |= {f"{name}.weight_scale": torch.float16 for name in matrices}
    kinds |= {f"{name}.weight": torch.float32 for name in norms} | {"d2t": torch.int32}
    assert {name: values.dtype for name, values in stored.items()} == kinds
    assert stored["fc.weight"].shape == (32, 64)
    assert stored["fc.weight_scale"].shape == (32, 2)


def test_the_config_carries_every_option_of_the_forward_pass(tmp_path: Path) -> None:
    export_drafter(tiny.trainer(tiny.recipe(drafter={"is_causal": False})), tmp_path, record={"schema": 1})
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "is_causal": False,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 2,
        "block_size": 4,
        "draft_vocab_size": 64,
        "vocab_size": tiny.VOCAB,
        "num_target_layers": 3,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["dflash_config"] == {
        "mask_token_id": tiny.MASK_ID,
        "target_layer_ids": [0, 2],
        "scale_block_embeddings": True,
    }
    assert json.loads((tmp_path / "training_record.json").read_text()) == {"schema": 1}


def test_a_full_vocabulary_needs_no_table(tmp_path: Path) -> None:
    export_drafter(tiny.trainer(tiny.recipe(drafter={"draft_vocab_size": tiny.VOCAB})), tmp_path, record={})
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
