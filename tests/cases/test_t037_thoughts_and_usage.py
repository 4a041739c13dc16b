"""T-037: tokens of thoughts never exceed those of the answer, streamed or not, wherever the answer is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.backends.scripted import Script, byte_tokenizer
from tests.serving import Served, events, serve

THINKING = "<|channel>thought\nplan and more"  # still thinking at every cap
ANSWERED = "<|channel>a<channel|>It is 5."
SCRIPTS = {"long": Script.of_text(THINKING, block_tokens=5), "": Script.of_text(ANSWERED, block_tokens=5)}
OPEN, CLOSE = 259, 260


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(SCRIPTS) as served:
        yield served


def by_hand(text: str, cap: int) -> tuple[int, int]:
    """Tokens of the answer and of its thoughts, markers left out."""
    tokenizer = byte_tokenizer()
    token_ids = [*tokenizer.encode(text, add_bos=False), tokenizer.eos_ids[-1]][:cap]
    end = token_ids.index(CLOSE) if CLOSE in token_ids else len(token_ids)
    thoughts = [token_id for token_id in token_ids[:end] if token_id not in (OPEN, *tokenizer.eos_ids)]
    return len(token_ids), len(thoughts)


@pytest.mark.parametrize("cap", [*range(1, 13), 200])
@pytest.mark.parametrize(("prompt", "text"), [("long", THINKING), ("short", ANSWERED)])
def test_usage_is_what_counting_by_hand_gives(served: Served, prompt: str, text: str, cap: int) -> None:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": cap, "reasoning_effort": "high"}
    usage = served.post("/v1/chat/completions", body).json()["usage"]
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert events(served.post("/v1/chat/completions", stream))[-2]["usage"] == usage
    num_tokens, num_thoughts = by_hand(text, cap)
    assert usage["completion_tokens"] == num_tokens
    assert usage["completion_tokens_details"]["reasoning_tokens"] == num_thoughts <= num_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + num_tokens
