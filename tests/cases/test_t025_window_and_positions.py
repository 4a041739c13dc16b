"""T-025: a drafter's window moves over positions that stay absolute, for keys and queries alike.

Rotary attention depends on distances only, so contexts that share what the window shows draft the same wherever they
end: no rebasing is needed, and rotary tables reach to the end of the context and a block beyond. A window of W shows
each slot itself and the W - 1 positions before it, the block's own included, as Hugging Face's models count.
Seen red: keys numbered otherwise than queries; a window measured from the anchor; blocks numbered from the window on.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.kernels.reference import TorchKernels
from outrider.models.dflash import DFlashDrafter
from outrider.models.draft_layers import BlockRows
from tests.cases.common import fresh_caches
from tests.toy import MASK_TOKEN_ID, block_logits, toy_drafter, toy_target

WINDOW, BLOCK_SIZE, ANCHOR = 12, 5, 44


class PositionKernels(TorchKernels):
    """Notes the largest position that anything is rotated by."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.largest = -1

    def head_norm_rope(
        self, heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, *, eps: float
    ) -> Tensor:
        self.largest = max(self.largest, int(positions.max()))
        return super().head_norm_rope(heads, weight, cos, sin, positions, eps=eps)


def context_taps(num_rows: int) -> Tensor:
    """Contexts of any length share their last twelve rows and no other."""
    last = torch.randn(WINDOW, 96, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    earlier = torch.randn(40, 96, generator=torch.Generator().manual_seed(num_rows), dtype=torch.float64)
    return torch.cat([earlier, last])[-num_rows:]


def drafted(drafter: DFlashDrafter, num_rows: int) -> Tensor:
    """Logits [4, V] of a block after a context."""
    caches = fresh_caches(drafter.config.layers)
    positions = torch.arange(num_rows)
    drafter.write_context(context_taps(num_rows), positions * 0, positions, caches)
    block = torch.tensor([ANCHOR, *[MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
    return block_logits(drafter, BlockRows(block, torch.tensor([0]), torch.tensor([num_rows]), BLOCK_SIZE), caches)[0]


@pytest.mark.parametrize("is_causal", [False, True])
def test_t025_what_the_window_shows_decides(is_causal: bool) -> None:
    kernels = PositionKernels()
    drafter = toy_drafter(toy_target(kernels=kernels), window=WINDOW, is_causal=is_causal)
    first = drafted(drafter, 12)
    for num_rows in (13, 40):
        kernels.largest = -1
        torch.testing.assert_close(drafted(drafter, num_rows), first, rtol=0, atol=1e-9)
        assert kernels.largest == num_rows + BLOCK_SIZE - 1  # absolute, the last slot's
    assert float((drafted(toy_drafter(drafter.target, is_causal=is_causal), 40) - first).abs().max()) > 1e-3


@pytest.mark.parametrize("is_causal", [False, True])
def test_t025_a_context_that_fits_is_not_clipped(is_causal: bool) -> None:
    target = toy_target()
    windowed, whole = (toy_drafter(target, window=window, is_causal=is_causal) for window in (WINDOW, None))
    fits = WINDOW - BLOCK_SIZE  # with the block
    torch.testing.assert_close(drafted(windowed, fits), drafted(whole, fits), rtol=0, atol=1e-9)


def test_t025_slots_near_a_short_context_see_all_of_it() -> None:
    """Ten rows and a block of five pass the window: slot 1 still sees position 0, slot 2 no more."""
    target = toy_target()
    windowed, whole = (drafted(toy_drafter(target, window=window, is_causal=True), 10) for window in (WINDOW, None))
    torch.testing.assert_close(windowed[0], whole[0], rtol=0, atol=1e-9)
    assert float((windowed[1] - whole[1]).abs().max()) > 1e-6
