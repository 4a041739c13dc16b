"""T-035: a tool call is read the same whether it comes whole, in tokens or cut anywhere.

Seen red: a parser that looks for markers in the new piece alone.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest

from outrider.server.chat import CONTROL_TOKENS, GEMMA4
from outrider.server.parser import ChatParser, ToolCallStart
from tests.server.answers import NUM_RANDOM_CUTS, TOOLS, read_answer, read_in_any_pieces

TEXTS = {
    "bare": 'Sure. <|tool_call>get_weather{city:"Oslo",days:3}<tool_call|> ok',
    "gemma": 'Sure. <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|> ok',
}


def as_tokens(text: str) -> list[str]:
    """Markers whole, as single special tokens are; other text one character a token."""
    parts = [text]
    for marker in CONTROL_TOKENS:
        parts = [
            piece
            for part in parts
            for piece in ([part] if part in CONTROL_TOKENS else _with_separators(part.split(marker), marker))
        ]
    return [token for part in parts for token in ([part] if part in CONTROL_TOKENS else part)]


def _with_separators(pieces: list[str], marker: str) -> list[str]:
    return [pieces[0], *(each for piece in pieces[1:] for each in (marker, piece))]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_t035_markers_as_text(text: str) -> None:
    answer = read_in_any_pieces(text)
    assert answer.content == "Sure. ok"
    assert [(name, json.loads(arguments)) for _, name, arguments in answer.calls] == [
        ("get_weather", {"city": "Oslo", "days": 3})
    ]
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_t035_markers_as_tokens(text: str) -> None:
    tokens, whole, rng = as_tokens(text), read_answer([text]), random.Random(1)
    assert "".join(tokens) == text
    for _ in range(NUM_RANDOM_CUTS):
        ends = sorted(rng.sample(range(len(tokens)), rng.randrange(1, len(tokens))))
        rounds = ["".join(tokens[a:b]) for a, b in itertools.pairwise([0, *ends, len(tokens)])]
        assert read_answer(rounds) == whole


def test_t035_id_and_name_come_first() -> None:
    for pieces in ([TEXTS["gemma"]], list(TEXTS["gemma"])):
        parser = ChatParser(GEMMA4, TOOLS, enable_thinking=False)
        deltas = [delta for piece in pieces for delta in parser.push(piece)]
        starts = [delta for delta in deltas if isinstance(delta, ToolCallStart)]
        assert len(starts) == 1
        assert starts[0].id
        assert starts[0].name == "get_weather"
