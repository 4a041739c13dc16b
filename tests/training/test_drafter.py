"""What a block may see when it is trained: what it will have when serving, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.kernels.reference import TorchKernels
from outrider.models.attention import allocate_caches
from outrider.models.dflash import DFlashDrafter
from outrider.models.drafter_config import DrafterConfig
from outrider.models.registry import load_drafter
from outrider.training import drafter as module
from outrider.training.capture import GridRunner
from outrider.training.config import Recipe
from outrider.training.drafter import TrainableDFlash, block_mask
from outrider.training.export import export_drafter
from outrider.training.trainer import Trainer
from outrider.weights.packed import DenseWeight, PackedWeight
from tests.training import tiny

LENGTH, BLOCK = 12, 4
ANCHORS = torch.tensor([[4, 5, 6]])


def model(*, is_causal: bool = True, sliding_window: int = 100) -> TrainableDFlash:
    drafter = {"is_causal": is_causal, "sliding_window": sliding_window}
    return tiny.trainer(tiny.recipe(drafter=drafter)).model


@pytest.fixture
def taps() -> Tensor:
    return torch.randn(1, LENGTH, 2 * tiny.HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def embeds() -> Tensor:
    return torch.randn(1, 3, BLOCK, tiny.HIDDEN, generator=torch.Generator().manual_seed(1))


def changed(before: Tensor, after: Tensor) -> list[bool]:
    """Which of the blocks [1, A, B - 1, N] differ."""
    return [bool(found) for found in (before - after).abs().amax(dim=(0, 2, 3)) > 1e-6]


@pytest.mark.parametrize("is_causal", [True, False])
@torch.no_grad()
def test_a_block_sees_features_before_its_anchor_only(taps: Tensor, embeds: Tensor, is_causal: bool) -> None:
    """T-069, for overlapping blocks too."""
    drafter = model(is_causal=is_causal)
    before = drafter(taps, ANCHORS, embeds)
    for position in range(LENGTH):
        other = taps.clone()
        other[0, position] += 1.0
        assert changed(before, drafter(other, ANCHORS, embeds)) == [position < anchor for anchor in ANCHORS[0].tolist()]


@torch.no_grad()
def test_features_that_a_window_has_left_behind_are_not_seen(taps: Tensor, embeds: Tensor) -> None:
    drafter = model(sliding_window=3)
    before = drafter(taps, ANCHORS, embeds)
    for position in range(LENGTH):  # slot 0 of the block at a is the first to look back: to a - 2
        other = taps.clone()
        other[0, position] += 1.0
        found = changed(before, drafter(other, ANCHORS, embeds))
        assert found == [anchor - 2 <= position < anchor for anchor in ANCHORS[0].tolist()]


@torch.no_grad()
def test_blocks_do_not_see_each_other(taps: Tensor, embeds: Tensor) -> None:
    """T-069: another block's slots never matter, and blocks one by one give the same."""
    drafter = model()
    before = drafter(taps, ANCHORS, embeds)
    for block in range(3):
        other = embeds.clone()
        other[0, block] += 1.0
        assert changed(before, drafter(taps, ANCHORS, other)) == [block == index for index in range(3)]
        alone = drafter(taps, ANCHORS[:, block : block + 1], embeds[:, block : block + 1])
        torch.testing.assert_close(alone[:, 0], before[:, block], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_short_causal_block_is_the_beginning_of_the_whole_one(taps: Tensor, embeds: Tensor) -> None:
    drafter = model(sliding_window=5)
    short = drafter(taps, ANCHORS, embeds[:, :, :3])
    torch.testing.assert_close(short, drafter(taps, ANCHORS, embeds)[:, :, :2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@torch.no_grad()
def test_a_causal_block_does_not_see_later_slots(taps: Tensor, embeds: Tensor, is_causal: bool) -> None:
    drafter = model(is_causal=is_causal)
    other = embeds.clone()
    other[:, :, -1] += 1.0
    change = (drafter(taps, ANCHORS, embeds) - drafter(taps, ANCHORS, other)).abs().amax(dim=(0, 1, 3)) > 1e-6
    assert change.tolist() == ([False, False, True] if is_causal else [True, True, True])


def test_the_mask_by_hand() -> None:
    mask = block_mask(torch.tensor([[2, 0]]), num_context=3, block_size=2, window=2, is_causal=True)
    assert mask.int().tolist() == [
        [
            [0, 1, 0, 1, 0, 0, 0],  # slot 0 at position 2: itself and position 1
            [0, 0, 0, 1, 1, 0, 0],  # slot 1 at position 3: itself and slot 0
            [0, 0, 0, 0, 0, 1, 0],  # a block at the very start has no context
            [0, 0, 0, 0, 0, 1, 1],
        ]
    ]


def test_sequences_of_a_batch_are_independent(taps: Tensor, embeds: Tensor) -> None:
    """T-072: also where a neighbour holds nonsense."""
    drafter = model()
    noise = torch.full_like(taps, 1e6)
    pair = drafter(torch.cat([taps, noise]), ANCHORS.expand(2, -1), embeds.expand(2, -1, -1, -1))
    torch.testing.assert_close(pair[:1], drafter(taps, ANCHORS, embeds), atol=1e-5, rtol=1e-5)


def packed(trainer: Trainer) -> dict[str, PackedWeight]:
    """The trained numbers as a file would hold them, unrounded."""
    numbers = {name: DenseWeight(name, values.detach()) for name, values in trainer.model.state_dict().items()}
    ids = trainer.draft_to_target
    if len(ids) < tiny.VOCAB:
        numbers["d2t"] = DenseWeight("d2t", ids - torch.arange(len(ids)))
    return dict(numbers)


def served(trainer: Trainer, taps: Tensor, token_ids: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits [A, K, Vd] and chances [A, K] of the engine's drafter over the text's own tokens [P]."""
    serving = tiny.target(kernels=TorchKernels(torch.float32))
    drafter = DFlashDrafter(
        trainer.config, packed(trainer), serving, kernels=serving.kernels, context_length=20, source=Path("tiny")
    )
    caches = allocate_caches(
        drafter.config.layers, num_seats=len(anchors), context_length=20, max_rows=20, dtype=torch.float32, device="cpu"
    )
    for seat, anchor in enumerate(anchors.tolist()):
        drafter.write_context(taps[:anchor], torch.full((anchor,), seat), torch.arange(anchor), caches)
    num_drafts = drafter.config.max_draft_length
    block = drafter.block(token_ids[anchors], torch.arange(len(anchors)), anchors, num_drafts=num_drafts)
    return drafter.draft_logits(block, caches, token_ids[anchors[:, None] + torch.arange(num_drafts)])


def exported(trainer: Trainer, folder: Path) -> DrafterConfig:
    """What the engine makes of the exported file, every tensor of which it takes."""
    export_drafter(trainer, folder / "tiny", record={})
    serving = tiny.target(kernels=TorchKernels(torch.float32))
    return load_drafter(folder / "tiny", serving, target_name="tiny", context_length=20).config


GEMMA4 = {"layer_style": "Gemma 4", "full_attention_layers": (0, 1), "sliding_window": 0, "rope_rotated": 0.25}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(tiny.recipe(drafter={"is_causal": False}), id="DFlash, non-causal"),
        pytest.param(tiny.recipe(drafter={"is_causal": None, "full_attention_layers": (1,)}), id="z-lab's layers"),
        pytest.param(tiny.recipe(drafter={"scale_block_embeddings": False}), id="unscaled"),
        pytest.param(tiny.recipe(drafter={"markov_rank": 8, "final_logit_softcapping": 2.0}), id="DFlash, Markov, cap"),
        pytest.param(tiny.dspark_recipe("vanilla"), id="DSpark"),
        pytest.param(tiny.dspark_recipe("gated", drafter={"draft_vocab_size": tiny.VOCAB}), id="DSpark, gated"),
        pytest.param(tiny.dspark_recipe("rnn", drafter={"confidence_head_with_markov": False}), id="DSpark, rnn"),
        pytest.param(tiny.dspark_recipe(drafter={**GEMMA4, "is_causal": None}), id="DeepSpec's Gemma 4 layers"),
    ],
)
@torch.no_grad()
def test_every_shape_is_what_the_engine_runs(recipe: Recipe, tmp_path: Path) -> None:
    """The joining test of both forward passes: which slot predicts what, windows, heads, norms, scale and cap.

    And of the config: what the engine reads is what was trained.
    """
    trainer = tiny.trainer(recipe)
    assert exported(trainer, tmp_path) == trainer.config
    token_ids = tiny.text(1).token_ids.long()
    layers, anchors = recipe.drafter.target_layer_ids, torch.tensor([[1, 2, 7, 11]])
    taps = GridRunner(trainer.target, num_sequences=1, num_positions=20).taps(token_ids, layers)
    num_drafts = trainer.config.max_draft_length
    assert num_drafts == recipe.drafter.block_size - (not recipe.drafter.sample_from_anchor)
    drafted = trainer.draft(taps, token_ids, anchors, num_drafts=num_drafts)
    logits = trainer.draft_logits(taps, token_ids, anchors, block_size=num_drafts + 1)
    expected, chances = served(trainer, taps[0], token_ids[0], anchors[0])
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    assert (drafted.confidence is None) is (chances is None)
    if drafted.confidence is not None:
        torch.testing.assert_close(drafted.confidence[0].sigmoid(), chances, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [True, False])
@torch.no_grad()
def test_blocks_in_several_calls_are_those_of_one(
    taps: Tensor, embeds: Tensor, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = model(is_causal=is_causal)
    together = drafter(taps, ANCHORS, embeds)
    monkeypatch.setattr(module, "ROWS_AT_A_TIME", 2 * BLOCK)  # two blocks, then one
    torch.testing.assert_close(drafter(taps, ANCHORS, embeds), together, atol=1e-5, rtol=1e-5)
