"""Log-probabilities of emitted tokens: raw, from the target's own logits before adjustments, temperature and filters.

That is what vLLM reports unless told otherwise: the figures say what the model thinks, do not change with a request's
sampling settings, and stay finite where a setting ruled a token out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.core import TokenLogprobs


def raw_logprobs(rows: Sequence[Tensor], token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """For each row of raw logits [V] the token emitted from it and the num_top likeliest, one row at a time."""
    return tuple(_of_row(row, token_id, num_top) for row, token_id in zip(rows, token_ids, strict=True))


def _of_row(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    top = logits.topk(min(num_top, len(logits)))
    total = logits.logsumexp(dim=-1)
    pairs = zip(top.indices.tolist(), (top.values - total).tolist(), strict=True)
    return TokenLogprobs(token_id, float(logits[token_id] - total), tuple(pairs))
