"""What a block may see when it is trained: what it will have when serving, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.training.drafter import TrainableDFlash, block_mask
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
