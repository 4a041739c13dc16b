"""T-034: a character whose bytes are spread over tokens or blocks is shown once, whole.

Seen red: every block decoded by itself.
"""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders
from tokenizers.models import BPE

from outrider.core import SamplingParams
from outrider.engine.state import RequestState
from outrider.tokenizer import IncrementalDecoder, Tokenizer

TEXT = "aé삼🙂🙂z"
BYTES = list(TEXT.encode())
NUM_CUTS = 300


def make_tokenizer() -> Tokenizer:
    """F6 with a real tokenizer: ids 0-255 are bytes, then the control tokens."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<bos>": 256, "<eos>": 257}
    backend = JsonTokenizer(BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<bos>", "<eos>"])
    return Tokenizer(backend, bos_id=256, eos_ids=[257])


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
    tokenizer = make_tokenizer()
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
