"""What a request asks to be done to the target's logits before anything is chosen from them.

The order is vLLM's: allowed tokens, bad words, end tokens before min_tokens, bias, then repetition, frequency and
presence penalties; temperature and filters come after (`sampling.py`). The result for a row depends on its logits and
on the tokens before it alone, so that a row of a drafted block is adjusted as plain decoding would adjust it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.errors import RequestError
from outrider.tokenizer import Tokenizer

Device = torch.device | str


@dataclass(frozen=True, eq=False)
class Adjustments:
    """The adjustments of one request; ids are int64 on the engine's device. Made by `make_adjustments`."""

    params: SamplingParams
    prompt_token_ids: Tensor  # [P]
    allowed_token_ids: Tensor | None
    bad_sequences: tuple[tuple[int, ...], ...]
    end_token_ids: Tensor  # what min_tokens rules out
    bias_token_ids: Tensor  # [b]
    biases: Tensor  # float64 [b]

    def apply(self, logits: Tensor, output_token_ids: Sequence[int]) -> Tensor:
        """Adjusted copy of one row of logits [V] that follows the generated tokens; -inf where a token is ruled out."""
        if self.allowed_token_ids is None:
            row = logits.clone()
        else:
            row = torch.full_like(logits, -torch.inf)
            row[self.allowed_token_ids] = logits[self.allowed_token_ids]
        forbidden = [bad[-1] for bad in self.bad_sequences if ends_with(output_token_ids, bad[:-1])]
        row[torch.tensor(forbidden, dtype=torch.int64, device=row.device)] = -torch.inf
        if len(output_token_ids) < self.params.min_tokens:
            row[self.end_token_ids] = -torch.inf
        row[self.bias_token_ids] += self.biases.to(row.dtype)
        return self._penalise(row, output_token_ids)

    def _penalise(self, row: Tensor, output_token_ids: Sequence[int]) -> Tensor:
        """Repetition penalty as Keskar et al. 2019 with the sign rule of Hugging Face; the other two as OpenAI's."""
        params = self.params
        repetition, frequency, presence = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if (repetition, frequency, presence) == (1.0, 0.0, 0.0):
            return row
        counts = Counter(output_token_ids)
        written = torch.tensor(list(counts), dtype=torch.int64, device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        seen = torch.cat([self.prompt_token_ids, written])
        row[seen] = torch.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
        row[written] -= frequency * times + presence
        return row


def asks_for_logits(params: SamplingParams, adjustments: Adjustments | None) -> bool:
    """True unless a request without a grammar takes the target's best token as it is and asks no more."""
    return not params.is_greedy or asks_for_more(params, adjustments)


def asks_for_more(params: SamplingParams, adjustments: Adjustments | None) -> bool:
    """True where a request without a grammar asks for more than temperature and filters."""
    return adjustments is not None or params.logprobs is not None


def adjusted_rows(
    adjustments: Adjustments, rows: list[Tensor], output_token_ids: Sequence[int], draft_token_ids: Sequence[int]
) -> list[Tensor]:
    """K + 1 rows [V] of a block, row j for the history that includes the j drafts before it."""
    return [adjustments.apply(row, [*output_token_ids, *draft_token_ids[:slot]]) for slot, row in enumerate(rows)]


def make_adjustments(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    *,
    end_token_ids: Iterable[int],
    vocab_size: int,
    tokenizer: Tokenizer | None,
    device: Device,
) -> Adjustments | None:
    """None where a request asks for none; RequestError where it names unknown tokens or could be left without any."""
    if not _is_adjusting(params):
        return None
    for name, asked in (("allowed_token_ids", params.allowed_token_ids or ()), ("logit_bias", params.logit_bias)):
        unknown = [token_id for token_id in asked if token_id >= vocab_size]
        if unknown:
            raise RequestError(f"{name} has token ids {unknown} outside 0..{vocab_size - 1}. Remove them.")
    bad = bad_sequences(params.bad_words, tokenizer, vocab_size=vocab_size)
    ends = sorted(token_id for token_id in end_token_ids if token_id < vocab_size)
    _check_something_is_left(params, {each[-1] for each in bad}, ends, vocab_size)

    def ids(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    return Adjustments(
        params=params,
        prompt_token_ids=ids(prompt_token_ids),
        allowed_token_ids=None if params.allowed_token_ids is None else ids(params.allowed_token_ids),
        bad_sequences=bad,
        end_token_ids=ids(ends),
        bias_token_ids=ids(params.logit_bias),
        biases=torch.tensor(list(params.logit_bias.values()), dtype=torch.float64, device=device),
    )


def _is_adjusting(params: SamplingParams) -> bool:
    return bool(
        params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _check_something_is_left(params: SamplingParams, last_ids: set[int], ends: Iterable[int], vocab_size: int) -> None:
    """Refuse what could rule out every token at once: no row may be without a token to choose."""

    def num_left(ruled_out: set[int]) -> int:
        allowed = params.allowed_token_ids
        return vocab_size - len(ruled_out) if allowed is None else len(set(allowed) - ruled_out)

    if not num_left(last_ids):
        raise RequestError("bad_words end in every token that allowed_token_ids leaves. Allow more, or forbid less.")
    if params.min_tokens and not num_left(last_ids.union(ends)):
        raise RequestError(
            f"min_tokens={params.min_tokens}, but allowed_token_ids and bad_words leave only tokens that end the text."
            " Allow more, or set min_tokens to 0."
        )


def bad_sequences(
    bad_words: Sequence[str], tokenizer: Tokenizer | None, *, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word as it stands and after a space, each once."""
    if not bad_words:
        return ()
    if tokenizer is None:
        raise RequestError("bad_words needs a tokenizer, and this engine has none. Leave it out.")
    spellings = (spelling for word in bad_words for spelling in (word.lstrip(), f" {word.lstrip()}"))
    found = dict.fromkeys(tuple(tokenizer.encode(spelling, add_bos=False)) for spelling in spellings)
    return tuple(
        each for each in found if each and max(each) < vocab_size
    )  # tokens the target has no logit for never come


def ends_with(token_ids: Sequence[int], tail: Sequence[int]) -> bool:
    """True where token_ids ends in tail; every sequence ends in nothing."""
    return len(tail) == 0 or list(token_ids[-len(tail) :]) == list(tail)
