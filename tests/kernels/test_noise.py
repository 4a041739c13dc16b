"""Noise against published vectors; of many keys at once, it is that of each.

Seen red: the word of another id of a block; keys without the slot.
"""

from __future__ import annotations

import pytest
import torch

from outrider.engine.sampling import gumbel_noise
from outrider.kernels.noise import NoisePurpose, gumbel_of_ids, philox


@pytest.mark.parametrize(
    ("seed", "counter", "words"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0_A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(seed: int, counter: tuple[int, ...], words: tuple[int, ...]) -> None:
    c_0, c_1, c_2, c_3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox(torch.tensor([seed]), (c_0, c_1, c_2, c_3))) == words
    assert tuple(philox(seed, counter)) == words  # type: ignore[arg-type]


def test_philox_of_many_counters_is_philox_of_each() -> None:
    seeds, blocks, nothing = torch.tensor([3, -7, 2**62]), torch.arange(3), torch.zeros(3, dtype=torch.int64)
    together = philox(seeds, (blocks, nothing, nothing, nothing))
    for i in range(3):
        alone = philox(seeds[i], (blocks[i], nothing[i], nothing[i], nothing[i]))
        assert [int(word) for word in alone] == [int(word[i]) for word in together]


def test_noise_of_ids_is_that_of_the_whole_vocabulary() -> None:
    seeds, positions, ids = torch.tensor([[5], [-6]]), torch.tensor([[0], [900]]), torch.tensor([[3, 70, 8], [0, 1, 2]])
    noise = gumbel_of_ids(seeds, positions, ids, NoisePurpose.MATCH)
    for request in range(2):
        whole = gumbel_noise(int(seeds[request]), int(positions[request]), 71)
        assert torch.equal(noise[request], whole[ids[request]])
    others = gumbel_of_ids(seeds, positions, ids, NoisePurpose.DRAFT), gumbel_of_ids(seeds, positions, ids, 3, slots=1)
    assert all(not (noise == other).any() for other in others)
