"""T-034: a character whose bytes are spread over tokens or blocks is shown once, whole.

Seen red: every block decoded by itself.
"""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.core import SamplingParams
from outrider.engine.state import RequestState
from outrider.tokenizer import IncrementalDecoder
from tests.byte_tokenizer import byte_tokenizer

TEXT = "aé삼🙂🙂z"
BYTES = list(TEXT.encode())
NUM_CUTS = 300


def cuts() -> list[list[list[int]]]:
    """Random cuts into blocks of 1 to 5, a byte a block, and one block."""
    rng, found = random.Random(0), [[[byte] for byte in BYTES], [BYTES]]
    for _ in range(NUM_CUTS):
        ends = [0]
        while ends[-1] < len(BYTES):
            ends.append(min(ends[-1] + rng.randint(1, 5), len(BYTES)))
        found.append([BYTES[start:end] for start, end in itertools.pairwise(ends)])
    return found


@pytest.mark.parametrize("shown_ids", [(), (257,)])
def test_t034_pieces_are_whole_characters(shown_ids: tuple[int, ...]) -> None:
    tokenizer = byte_tokenizer()
    for blocks in cuts():
        decoder = IncrementalDecoder(tokenizer, shown_ids=shown_ids)
        request = RequestState(
            index=0,
            prompt_token_ids=(256,),
            params=SamplingParams(),
            noise_seed=0,
            draft_length=4,
            num_tokens_left=100,
            stop_token_ids=frozenset({257}),
            decoder=decoder,
        )
        chunks = [request.append(block, num_accepted_tokens=len(block) - 1) for block in [*blocks, [257]]]
        assert "".join(chunk.text for chunk in chunks) == request.text == TEXT == tokenizer.decode(BYTES)
        assert not [chunk for chunk in chunks if "\N{REPLACEMENT CHARACTER}" in chunk.text]
        assert [len(chunk.token_ids) for chunk in chunks] == [*map(len, blocks), 1]  # counted though nothing is shown
