"""T-029: of a stop and the token cap the earlier in token order wins, as in plain decoding; on one token the stop does.

Seen red: RequestState.append setting finish_reason to length before it looks for stops; caps cut before stops.
"""

from __future__ import annotations

import pytest

from outrider.core import SamplingParams
from tests.cases.common import ByteTokenizer, TextTarget
from tests.scripted import ScriptedProposer, make_test_engine

STOP = ord("!")
TEXT = [2, *(ord(letter) for letter in "xya!bcdefgh")]  # the stop is the fourth token of the answer
SPLIT = [2, *(ord(letter) for letter in "xyPQbcdefgh")]


def run(text: list[int], params: SamplingParams, *, drafts: bool) -> tuple[list[int], str, str | None]:
    """Two tokens first (prefill, and a round with nothing accepted), then full blocks of five."""
    proposer = ScriptedProposer([text], script=(0, 4, 4, 4), vocab_size=272) if drafts else None
    engine = make_test_engine(TextTarget(text), proposer, tokenizer=ByteTokenizer(), max_seats=1)  # type: ignore[arg-type]
    request = engine.add(text[:1], params)
    streamed = ""
    while engine.has_work:
        streamed += "".join(chunk.text for chunk in engine.step())
    assert streamed == request.text
    return request.output_token_ids, request.text, request.finish_reason


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_t029_stop_token(max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,))
    length = min(max_tokens, 4)
    expected = (TEXT[1 : 1 + length], "xya"[:length], "stop" if max_tokens >= 4 else "length")
    assert run(TEXT, params, drafts=True) == expected
    assert run(TEXT, params, drafts=False) == expected


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_t029_stop_string_of_two_tokens(max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, stop_strings=("PQ",))
    length = min(max_tokens, 4)
    text = "xy" if max_tokens >= 4 else "xyP"[:length]
    expected = (SPLIT[1 : 1 + length], text, "stop" if max_tokens >= 4 else "length")
    assert run(SPLIT, params, drafts=True) == expected
    assert run(SPLIT, params, drafts=False) == expected
