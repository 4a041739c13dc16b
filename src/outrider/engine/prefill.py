"""Prompts in pieces: rows of one request into the caches, and the first token after the last of them."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.batch import CycleBatch
from outrider.engine.cycle import Judged, accept
from outrider.engine.proposer import Proposer
from outrider.engine.rejection import point_mass_block
from outrider.engine.state import RequestState
from outrider.models.attention import LayerCaches, Rows
from outrider.models.gemma import GemmaTarget


def num_chunk_rows(request: RequestState, rows_per_chunk: int) -> int:
    """Rows up to the next chunk border. Borders lie at fixed positions, wherever a cached prefix ends."""
    start = request.num_computed_tokens
    border = (start // rows_per_chunk + 1) * rows_per_chunk
    return min(border, len(request.prefill_token_ids)) - start


def prefill_chunk(
    request: RequestState,
    num_rows: int,
    *,
    target: GemmaTarget,
    caches: LayerCaches,
    proposer: Proposer | None,
    rows_per_pass: int | None,
) -> Tensor:
    """Run the request's next rows through the target; the drafter gets the taps of every one of them.

    Returns their hidden states [R, N]; `rows_per_pass` pads R with spare rows.
    """
    rows = prompt_rows(request, num_rows, num_spare=max(0, (rows_per_pass or 0) - num_rows), device=target.device)
    output = target.forward(rows, caches, tap_layers=proposer.tap_layers if proposer else ())
    if proposer is not None and output.taps is not None:
        proposer.commit(output.taps, rows.seats, rows.positions)
    request.num_computed_tokens += num_rows
    return output.hidden


def prompt_rows(request: RequestState, num_rows: int, *, num_spare: int, device: torch.device) -> Rows:
    """The rows that follow what is computed, then spare ones."""
    start = request.num_computed_tokens
    token_ids = torch.tensor(request.prefill_token_ids[start : start + num_rows], device=device)
    positions = torch.arange(start, start + num_rows, device=device)
    spare = positions.new_zeros(num_spare)
    seats = torch.cat([torch.full_like(positions, request.seat), spare - 1])
    given = request.given.cut(start, len(seats)) if request.given is not None else None
    return Rows(torch.cat([token_ids, spare]), seats, torch.cat([positions, spare]), given)


def first_token(
    request: RequestState, hidden: Tensor, num_rows: int, *, target: GemmaTarget, is_padded: bool
) -> Judged:
    """What follows the prompt whose last row is the last of `num_rows` in hidden [R, N].

    With constant shapes the head, too, always sees the same number of rows.
    """
    last_row = num_rows - 1
    if not is_padded:
        hidden, last_row = hidden[last_row : last_row + 1], 0
    batch = CycleBatch.at_prompt_end(request, target.device)
    nothing = point_mass_block(batch.seats.new_empty(1, 0), hidden.dtype)
    return accept(batch, nothing, target, hidden, batch.seats.new_full((1, 1), last_row))
