"""T-002 on a GPU: our kernels have no ties to tell from faults, since a row is the same bits in every pass.

Plain torch products have them or not, as the library cuts them; what flips there is a tie.
"""

from __future__ import annotations

import pytest
import torch

from tests.cases.test_t002_ties_and_faults import NUM_TOKENS, flips, logits_of
from tests.engine.test_graphs_gpu import VOCAB, target

TEXTS = torch.randint(3, VOCAB, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [1, 7, 16])
def test_t002_our_kernels_give_the_same_bits_in_pieces(piece: int) -> None:
    for text in TEXTS:
        assert torch.equal(
            logits_of(target("auto"), text, piece=NUM_TOKENS), logits_of(target("auto"), text, piece=piece)
        )


@pytest.mark.gpu
def test_t002_what_torch_products_flip_are_ties() -> None:
    whole, steps = zip(
        *((logits_of(target("torch"), text, piece=n) for n in (NUM_TOKENS, 1)) for text in TEXTS), strict=True
    )
    tolerance = float((whole[0] - steps[0]).abs().max())
    _, count = flips(whole[1], steps[1], 2 * tolerance)
    print(f"tolerance {2 * tolerance:.4f}: {count.num_ties} ties of {count.num_positions}")  # noqa: T201
    assert count.num_faults == 0
