"""Text to token ids and back, from a `tokenizer.json` alone; decoding also piece by piece while a text is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer as JsonTokenizer

from outrider.errors import LocateError, RequestError, WeightsError

BOS_TOKEN = "<bos>"
EOS_TOKEN = "<eos>"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A Gemma tokenizer: BPE over text with "▁" for spaces, and byte tokens for what the vocabulary lacks."""

    def __init__(self, backend: JsonTokenizer, *, bos_id: int, eos_ids: Sequence[int]) -> None:
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        byte_ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_ids = frozenset(token_id for token_id in byte_ids if token_id is not None)

    @classmethod
    def from_file(cls, path: Path, *, eos_ids: Sequence[int] | None = None) -> Tokenizer:
        """Read a `tokenizer.json`; `eos_ids` (from the model's config) replaces its own "<eos>"."""
        if not path.is_file():
            raise LocateError(f"{path} does not exist. Put the model's tokenizer.json there.")
        try:
            backend = JsonTokenizer.from_file(str(path))
        except Exception as error:  # all that the library raises for a bad file
            raise WeightsError(f"{path} is not a readable tokenizer.json: {error}") from error
        bos_id, eos_id = backend.token_to_id(BOS_TOKEN), backend.token_to_id(EOS_TOKEN)
        if bos_id is None or eos_id is None:
            raise WeightsError(f"{path} has no {BOS_TOKEN} or no {EOS_TOKEN} token; it is not a Gemma tokenizer.")
        return cls(backend, bos_id=bos_id, eos_ids=(eos_id,) if eos_ids is None else eos_ids)

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of a text, after a begin token unless `add_bos` is false.

        A text that begins with the begin token's own spelling gets no second one: every path to a model comes by here.
        """
        try:
            token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # how the library refuses a lone surrogate
            raise RequestError("The text is not valid Unicode: it holds half of a surrogate pair.") from error
        return [self.bos_id, *token_ids] if add_bos and token_ids[:1] != [self.bos_id] else token_ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids. Control tokens are left out; bytes that form no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def id_of(self, spelling: str) -> int | None:
        """The id of a token by its exact spelling, such as "<bos>"; None if the vocabulary has no such token."""
        token_id: int | None = self._backend.token_to_id(spelling)
        return token_id

    def spellings(self) -> list[str]:
        """Every token as the vocabulary spells it, by id: "▁" for a space, "<0x0A>" for a byte; gaps are empty."""
        by_id = {token_id: spelling for spelling, token_id in self._backend.get_vocab(with_added_tokens=True).items()}
        return [by_id.get(token_id, "") for token_id in range(max(by_id) + 1)]

    def token_text(self, token_id: int) -> str:
        """How to show one token by itself: its text, or its spelling for control tokens and for parts of characters."""
        spelling: str | None = self._backend.id_to_token(token_id)
        if spelling is None:
            raise IndexError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}.")
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return spelling if _BYTE_TOKEN.fullmatch(spelling) and _REPLACEMENT in text else text


class IncrementalDecoder:
    """Decodes one stream of tokens as it grows. The pieces, joined, are `Tokenizer.decode` of all tokens.

    A run of byte tokens is kept back until another token ends it: whether a run is text is decided for all of it.
    Control tokens are left out but for those in `shown_ids`, which are spelled out.
    """

    def __init__(self, tokenizer: Tokenizer, *, shown_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = frozenset(shown_ids) & tokenizer.special_ids
        self._left_out_ids = tokenizer.special_ids - self._shown_ids
        self._pending_bytes: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is final with them, perhaps empty."""
        pending = [*self._pending_bytes, *(i for i in token_ids if i not in self._left_out_ids)]
        end = len(pending)
        while end and pending[end - 1] in self._tokenizer.byte_ids:
            end -= 1
        self._pending_bytes = pending[end:]
        return self._decode(pending[:end])

    def _decode(self, token_ids: list[int]) -> str:
        if self._shown_ids.isdisjoint(token_ids):
            return self._tokenizer.decode(token_ids)
        runs = groupby(token_ids, key=lambda token_id: token_id in self._shown_ids)
        return "".join(
            "".join(map(self._tokenizer.token_text, run)) if is_shown else self._tokenizer.decode(run)
            for is_shown, run in runs
        )

    def flush(self) -> str:
        """Return what was kept back, at the end of the stream."""
        pending, self._pending_bytes = self._pending_bytes, []
        return self._tokenizer.decode(pending)
