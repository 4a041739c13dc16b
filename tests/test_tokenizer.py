"""Encoding equals transformers', decoding in pieces equals decoding at once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import LocateError, RequestError, WeightsError
from outrider.tokenizer import IncrementalDecoder, Tokenizer

GOLDEN = Path(__file__).parent / "golden" / "tokenizer" / "encodings.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from outrider.weights.loader import load_checkpoint
    from outrider.weights.locate import locate_target

    return Tokenizer.from_file(load_checkpoint(locate_target(None)).tokenizer_path)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The byte tokens of some bytes: in this vocabulary they follow one another."""
    (first,) = (i for i in tokenizer.byte_ids if tokenizer.token_text(i) == "\x00")
    return [first + byte for byte in data]


def pieces(tokenizer: Tokenizer, token_ids: list[int], *, sizes: list[int] | None = None) -> list[str]:
    """What an incremental decoder gives for the tokens in groups of the given sizes (default: one by one)."""
    decoder, texts, start = IncrementalDecoder(tokenizer), [], 0
    for size in sizes or [1] * len(token_ids):
        texts.append(decoder.push(token_ids[start : start + size]))
        start += size
    return [*texts, decoder.flush()]


def test_the_fixture_is_broad() -> None:
    characters = {character for case in CASES for character in case["text"]}
    assert len(CASES) >= 200
    for sample in "aяλعאन漢はก한😀\u200d🇬\n\t\x00":
        assert sample in characters


def test_encodes_as_transformers(tokenizer: Tokenizer) -> None:
    """Except that transformers gives a text with a begin token of its own a second one."""
    doubled = [case["token_ids"][:2] == [tokenizer.bos_id] * 2 for case in CASES]
    assert any(doubled)
    expected = [case["token_ids"][is_doubled:] for case, is_doubled in zip(CASES, doubled, strict=True)]
    pairs = zip(CASES, expected, strict=True)
    assert [case["text"] for case, token_ids in pairs if tokenizer.encode(case["text"]) != token_ids] == []


def test_decodes_as_transformers(tokenizer: Tokenizer) -> None:
    different = [case["text"] for case in CASES if tokenizer.decode(case["token_ids"]) != case["decoded"]]
    assert different == []


def test_begin_token_is_optional(tokenizer: Tokenizer) -> None:
    with_bos = tokenizer.encode("Hello")
    assert with_bos[0] == tokenizer.bos_id == 2
    assert tokenizer.encode("Hello", add_bos=False) == with_bos[1:]
    assert tokenizer.encode("<bos>Hello") == with_bos
    assert tokenizer.encode("") == [2]
    assert tokenizer.encode("", add_bos=False) == []


def test_facts_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 262_144
    assert tokenizer.eos_ids == (1,)
    assert {0, 1, 2, 3} <= tokenizer.special_ids
    assert len(tokenizer.byte_ids) == 256


def test_text_of_one_token(tokenizer: Tokenizer) -> None:
    (space_a,) = tokenizer.encode(" a", add_bos=False)
    assert tokenizer.token_text(space_a) == " a"
    assert tokenizer.token_text(1) == "<eos>"
    first, letter = byte_ids(tokenizer, b"\xe2A")
    assert tokenizer.token_text(first) == "<0xE2>"
    assert tokenizer.token_text(letter) == "A"
    with pytest.raises(IndexError, match="token id 262144 is outside the vocabulary of 262144"):
        tokenizer.token_text(262_144)


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        tokenizer.encode("a\ud800b")


def test_pieces_join_to_the_whole(tokenizer: Tokenizer) -> None:
    for case in CASES:
        assert "".join(pieces(tokenizer, case["token_ids"])) == case["decoded"]


def test_pieces_of_random_tokens_join_to_the_whole(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    valid = [byte_ids(tokenizer, character.encode()) for character in "é€😀A𒀀"]
    for _ in range(300):
        token_ids: list[int] = []
        for _ in range(rng.randrange(1, 12)):
            kind = rng.randrange(4)
            if kind == 0:
                token_ids += rng.choice(valid)
            elif kind == 1:
                token_ids += byte_ids(tokenizer, bytes([rng.randrange(256)]))
            else:
                token_ids.append(rng.randrange(tokenizer.vocab_size) if kind == 2 else rng.randrange(6))
        sizes = []
        while sum(sizes) < len(token_ids):
            sizes.append(rng.randrange(1, 4))
        assert "".join(pieces(tokenizer, token_ids, sizes=sizes)) == tokenizer.decode(token_ids)


def test_half_a_character_is_kept_back(tokenizer: Tokenizer) -> None:
    following = tokenizer.encode(" next", add_bos=False)
    token_ids = byte_ids(tokenizer, "𒀀€".encode()) + following
    assert pieces(tokenizer, token_ids) == ["", "", "", "", "", "", "", "𒀀€ next", ""]
    assert pieces(tokenizer, token_ids[:3])[-1] == REPLACEMENT * 3  # only the end of the stream decides so


def test_control_tokens_do_not_end_a_character(tokenizer: Tokenizer) -> None:
    first, *rest = byte_ids(tokenizer, "€".encode())
    assert pieces(tokenizer, [first, tokenizer.bos_id, *rest]) == ["", "", "", "", "€"]


def test_control_tokens_that_are_shown(tokenizer: Tokenizer) -> None:
    turn = tokenizer.id_of("<end_of_turn>")
    assert turn is not None
    assert turn in tokenizer.special_ids
    hello, euro = tokenizer.encode(" hello", add_bos=False), byte_ids(tokenizer, "€".encode())
    decoder = IncrementalDecoder(tokenizer, shown_ids=[turn, *hello])
    assert decoder.push([tokenizer.bos_id, *hello, turn, *hello, turn, turn]) == (
        " hello<end_of_turn> hello<end_of_turn><end_of_turn>"
    )
    assert [decoder.push([token_id]) for token_id in [*euro, turn]] == ["", "", "", "€<end_of_turn>"]
    assert decoder.flush() == ""


def test_ids_by_spelling(tokenizer: Tokenizer) -> None:
    assert tokenizer.id_of("<bos>") == tokenizer.bos_id
    assert tokenizer.id_of("<no such token>") is None


def test_end_tokens_can_come_from_the_config(tokenizer: Tokenizer, tiny_json: Path) -> None:
    assert Tokenizer.from_file(tiny_json).eos_ids == (1,)
    assert Tokenizer.from_file(tiny_json, eos_ids=[1, 106]).eos_ids == (1, 106)


@pytest.fixture
def tiny_json(tmp_path: Path) -> Path:
    model = {"type": "BPE", "vocab": {"<bos>": 0, "<eos>": 1, "a": 2}, "merges": []}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return path


def test_files_that_are_no_tokenizer(tiny_json: Path) -> None:
    with pytest.raises(LocateError, match=r"absent\.json does not exist"):
        Tokenizer.from_file(tiny_json.with_name("absent.json"))
    tiny_json.write_text(tiny_json.read_text().replace("<bos>", "<s>"))
    with pytest.raises(WeightsError, match="has no <bos> or no <eos> token"):
        Tokenizer.from_file(tiny_json)
    tiny_json.write_text("{cut")
    with pytest.raises(WeightsError, match=r"tokenizer\.json is not a readable tokenizer\.json"):
        Tokenizer.from_file(tiny_json)
