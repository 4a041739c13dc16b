from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from outrider.training.corpus_card import Sample, bias, card_markdown, domain_of, guess_language, intent_of, make_card
from tests.training.talk import row


def sample(line: dict[str, Any], *, turn: int = 0, text: str = "Yes.", tokens: int = 3, **more: Any) -> Sample:
    record = {"prompt_token_ids": [1, 2], "token_ids": [5] * tokens, "text": text, "finish_reason": "stop"}
    return Sample(row(json.dumps(line)), turn, {**record, "has_thought": False, "num_calls": 0, **more})


SAMPLES = [
    sample({"prompt": "Write a loop."}, text="```python\nfor x in y: pass\n```", tokens=5),
    sample({"prompt": "Explain why this code is the way to write it."}, text="```\nx\n```", finish_reason="length"),
    sample({"prompt": "Was ist das und wie?", "domain": "Travel|trips"}, turn=1, has_thought=True),
    sample({"prompt": "Time?", "tools": [{"type": "function"}]}, num_calls=2, tokens=9),
]


def card() -> dict[str, Any]:
    return make_card(
        SAMPLES, made_of={"target_sha256": "abc"}, chat="gemma4", num_conversations=4, dropped=Counter({"bad row": 2})
    )


def test_a_card_counts_what_the_samples_are() -> None:
    found = card()
    assert found["domains"] == {"code": 0.5, "tools": 0.25, "travel|trips": 0.25}
    assert found["languages"] == {"english": 0.5, "german": 0.25, "unknown": 0.25}
    assert found["code_intents"] == {"explain": 0.5, "implement": 0.5}
    assert found["code_languages"] == {"python": 1.0}
    assert found["slices"] == {
        "thinking": 0.25, "tool_calls": 0.25, "later_turns": 0.25, "code": 0.5, "cut_at_the_limit": 0.25,
    }  # fmt: skip
    assert found["answer_tokens"] == {"min": 3, "median": 5, "max": 9, "total": 20}
    assert found["prompt_tokens"] == {"min": 2, "median": 2, "max": 2, "total": 8}
    assert (found["num_samples"], found["num_tokens"], found["dropped"]) == (4, 20, {"bad row": 2})
    assert json.loads(json.dumps(found)) == found


def test_the_bias_names_what_is_most_and_what_is_missing() -> None:
    assert "50% of the answers are code, 50% follow a question in english" in card()["bias"]
    assert "little or nothing" not in card()["bias"]
    none = {"thinking": 0.0, "tool_calls": 0.04, "later_turns": 0.06, "code": 0.0}
    said = bias({"domains": {"chat": 1.0}, "languages": {"dutch": 0.9}, "code_intents": {}, "code_languages": {}}, none)
    assert "little or nothing of thinking, tool calls, code:" in said


def test_the_page_says_what_the_record_says() -> None:
    page = card_markdown(card())
    assert page.startswith("# Corpus card\n\nThis corpus is biased:")
    for line in ("| travel\\|trips | 25.0% |", "| tool calls | 25.0% |", "- bad row: 2", "median 5, 3 to 9"):
        assert line in page
    assert "- nothing" in card_markdown({**card(), "dropped": {}})


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the time in Rome?", "english"),
        ("Comment est la météo dans les Alpes ?", "french"),
        ("¿Qué es el amor y por qué?", "spanish"),
        ("Как дела?", "russian or kin"),
        ("日本の春は?", "japanese"),
        ("长江在哪里?", "chinese"),
        ("", "unknown"),
        ("xyzzy", "unknown"),
    ],
)
def test_a_language_is_guessed_or_unknown(text: str, language: str) -> None:
    assert guess_language(text) == language


def test_a_row_knows_its_own_domain_best() -> None:
    assert domain_of(sample({"prompt": "def f(): pass"})) == "code"
    assert domain_of(sample({"prompt": "def f(): pass", "category": " Math "})) == "math"
    assert domain_of(sample({"prompt": "Hello."})) == "chat"
    assert intent_of(sample({"prompt": "Hello."})) == "other"
