"""T-003: drafts that are always the drafter's top token are a point mass, whatever its softmax said.

Seen red: DraftBlock of the top tokens with the softmax (0.50, 0.20, 0.30) as their candidates.
"""

from __future__ import annotations

import torch

from outrider.engine.rejection import accept_by_rejection, point_mass_block
from outrider.engine.sampling import draw
from tests.statistics import assert_frequencies

NUM_DRAWS = 20_000
TARGET = (0.25, 0.45, 0.30)


def test_t003_positions_of_a_block_follow_the_target() -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(NUM_DRAWS, 4, generator=generator, dtype=torch.float64)
    draft = point_mass_block(torch.zeros(NUM_DRAWS, 3, dtype=torch.int64), torch.float64)
    probs = torch.tensor(TARGET, dtype=torch.float64).expand(NUM_DRAWS, 4, 3)
    num_accepted, left = accept_by_rejection(draft, probs, torch.full((NUM_DRAWS,), 3), uniform[:, :3])
    added = draw(left, uniform[:, 3])
    for slot in range(3):
        reached = num_accepted >= slot  # conditioned on the drafts before being accepted
        tokens = torch.where(num_accepted > slot, 0, added)[reached]
        assert_frequencies(tokens.tolist(), TARGET)
