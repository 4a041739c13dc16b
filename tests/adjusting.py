"""Adjustments token by token in plain Python: no tensors, no engine, the rules as the documentation states them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from outrider.core import SamplingParams

BAD_SEQUENCES = ((7,), (32, 7), (1, 2), (32, 1, 2), (3, 3, 4), (32, 3, 3, 4))
ALL_RULES = SamplingParams(
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.3,
    logit_bias={1: 1.5, 8: -2.0, 9: 4.0, 90: 3.0},
    allowed_token_ids=tuple(range(80)),
    bad_words=("\7", "\1\2", " \3\3\4"),
    min_tokens=6,
)


class CharTokenizer:
    """Every character is the token of its number; nothing ends a text and nothing is kept back."""

    vocab_size = 128
    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    byte_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Numbers of the characters."""
        assert not add_bos
        return [ord(character) for character in text]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Characters of the numbers."""
        return "".join(chr(token_id) for token_id in token_ids)


def reference_row(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    end_token_ids: Sequence[int] = (),
    bad: Sequence[tuple[int, ...]] = BAD_SEQUENCES,
) -> list[float]:
    """One row of logits as the rules want it: ruled-out tokens, then bias, then penalties."""
    row = []
    for token_id, logit in enumerate(logits):
        text = (*output, token_id)
        is_bad = bool(params.bad_words) and any(text[-len(sequence) :] == sequence for sequence in bad)
        is_early = token_id in end_token_ids and len(output) < params.min_tokens
        if is_bad or is_early or (params.allowed_token_ids is not None and token_id not in params.allowed_token_ids):
            row.append(-math.inf)
            continue
        value = logit + params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        num_before = list(output).count(token_id)
        row.append(value - params.frequency_penalty * num_before - params.presence_penalty * (num_before > 0))
    return row


def reference_text(
    next_logits: Callable[[list[int]], list[float]],
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    end_token_ids: Sequence[int],
    tokenizer: CharTokenizer | None = None,
) -> list[int]:
    """Greedy tokens after a prompt, everything computed anew for each, up to max_tokens or an end token."""
    spell = (tokenizer or CharTokenizer()).encode
    spellings = [spelling for word in params.bad_words for spelling in (word.strip(), f" {word.strip()}")]
    bad = tuple(tuple(spell(spelling, add_bos=False)) for spelling in spellings)
    output: list[int] = []
    assert params.max_tokens is not None
    while len(output) < params.max_tokens and not set(output) & set(end_token_ids):
        logits = next_logits([*prompt, *output])
        row = reference_row(logits, params, prompt, output, end_token_ids=end_token_ids, bad=bad)
        output.append(row.index(max(row)))
    return output
