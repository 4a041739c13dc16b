"""The tokenizer.json that is rebuilt from a GGUF vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.gguf_file import GgufFile, read_gguf
from outrider.weights.gguf_tokenizer import tokenizer_json
from tests.weights.tiny_gguf import TOKENS


def with_metadata(file: GgufFile, key: str, value: Any) -> GgufFile:
    return replace(file, metadata={**file.metadata, key: value})


@pytest.fixture
def tiny(tiny_gguf: Path) -> GgufFile:
    return read_gguf(tiny_gguf)


def test_merges_follow_the_order_of_the_vocabulary(tiny: GgufFile) -> None:
    merges = json.loads(tokenizer_json(tiny))["model"]["merges"]
    expected = [["\n", "\n"], ["▁", "▁"], ["a", "b"], ["▁", "a"], ["▁a", "b"], ["▁", "ab"], ["ab", "c"]]
    assert merges == expected


def test_encodes_with_merges_bytes_and_spaces(tiny: GgufFile) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(tiny))
    assert tokenizer.encode("ab  abc\n\né").tokens == ["<bos>", "ab", "▁▁", "abc", "\n\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [TOKENS.index("ab")]


def test_added_tokens_are_controls_and_user_defined_but_no_spaces(tiny: GgufFile) -> None:
    added = json.loads(tokenizer_json(tiny))["added_tokens"]
    assert [(token["content"], token["special"]) for token in added] == [
        *[(token, True) for token in TOKENS[:5]],
        ("\n", False),
        ("\n\n", False),
    ]


def test_no_begin_token_where_the_file_declares_none(tiny: GgufFile) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(with_metadata(tiny, "tokenizer.ggml.add_bos_token", False)))
    assert tokenizer.encode("ab").tokens == ["ab"]


def test_other_kinds_of_tokenizer_are_refused(tiny: GgufFile) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf has a 'gpt2' tokenizer"):
        tokenizer_json(with_metadata(tiny, "tokenizer.ggml.model", "gpt2"))


def test_vocabularies_that_do_not_add_up_are_refused(tiny: GgufFile) -> None:
    with pytest.raises(WeightsError, match=r"as many entries in tokenizer\.ggml\.token_type"):
        tokenizer_json(with_metadata(tiny, "tokenizer.ggml.token_type", [1, 2]))
    with pytest.raises(WeightsError, match="lists a token twice"):
        tokenizer_json(with_metadata(tiny, "tokenizer.ggml.tokens", [*TOKENS[:-1], TOKENS[0]]))


NO_TOKEN_ID = [-1, len(TOKENS), 2.5, float("nan"), "x", [1], True]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("bos_token_id", value) for value in NO_TOKEN_ID),
        *(("unknown_token_id", value) for value in NO_TOKEN_ID),
        *(("add_bos_token", value) for value in (0, 1, "x", [])),
        *(("tokens", value) for value in ("x", 1, [1], True)),
        *(("token_type", value) for value in ("x", 1, ["a"], [2.5])),
    ],
)
def test_fields_of_the_wrong_kind_or_range_are_named(tiny: GgufFile, key: str, value: Any) -> None:
    """Seen red: taking ids as they stand, which indexed past the vocabulary."""
    with pytest.raises(WeightsError, match=rf"tiny\.gguf has tokenizer\.ggml\.{key}=.*; expected "):
        tokenizer_json(with_metadata(tiny, f"tokenizer.ggml.{key}", value))
