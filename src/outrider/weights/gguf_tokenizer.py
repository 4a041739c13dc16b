"""Rebuild a Gemma `tokenizer.json` from the SentencePiece vocabulary that a GGUF file carries.

The file has tokens and scores but no merges. Gemma's merge order is the order of its vocabulary, so every way to cut a
token into two other tokens is a merge, ranked by the token's id. The result encodes as transformers' own converter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.fields import Fields
from outrider.weights.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"


def tokenizer_json(file: GgufFile) -> str:
    """The text of a `tokenizer.json` for this file's vocabulary."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind != "llama":
        raise UnsupportedModelError(f"{file.path} has a {kind!r} tokenizer; supported: 'llama' (SentencePiece).")
    fields = Fields(file.metadata, source=file.path)
    stored, token_types = _vocabulary(fields)
    tokens = [_SPACE * len(token) if _is_spaces(token) else token for token in stored]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise WeightsError(f"{file.path} lists a token twice in tokenizer.ggml.tokens; the vocabulary is corrupt.")
    unknown_id = fields.integer("tokenizer.ggml.unknown_token_id", low=0, high=len(tokens) - 1, default=3)
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(stored, token_types),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": _bos_template(fields, tokens),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown_id],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges(tokens, vocabulary),
        },
    }
    return json.dumps(description, ensure_ascii=False, separators=(",", ":"))


def _vocabulary(fields: Fields) -> tuple[list[str], list[int]]:
    tokens, token_types = fields.texts("tokenizer.ggml.tokens"), fields.integers("tokenizer.ggml.token_type")
    if not tokens or len(token_types) != len(tokens):
        raise WeightsError(
            f"{fields.source} lacks tokenizer.ggml.tokens, or as many entries in tokenizer.ggml.token_type."
        )
    return tokens, token_types


def _is_spaces(token: str) -> bool:
    return bool(token) and not token.strip(" ")


def _merges(tokens: Sequence[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Cuts of every token in id order; of one token's cuts the one with the longest left part comes first."""
    merges = []
    for token in tokens:
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((left, right))
    return merges


def _added_tokens(tokens: Sequence[str], token_types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are matched whole before anything else: control tokens, and user-defined ones such as newlines.

    Runs of spaces are marked user-defined as well, but ordinary merges make them, after spaces became "▁".
    """
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_type == _CONTROL,
        }
        for index, (token, token_type) in enumerate(zip(tokens, token_types, strict=True))
        if token_type in (_CONTROL, _USER_DEFINED) and not _is_spaces(token)
    ]


def _bos_template(fields: Fields, tokens: Sequence[str]) -> dict[str, Any] | None:
    if not fields.boolean("tokenizer.ggml.add_bos_token", default=True):
        return None
    bos_id = fields.integer("tokenizer.ggml.bos_token_id", low=0, high=len(tokens) - 1, default=2)
    bos = tokens[bos_id]
    first = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
