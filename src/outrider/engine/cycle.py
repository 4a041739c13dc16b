"""One cycle: draft → choose → verify → accept → commit. This file is that picture and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.batch import CycleBatch, pack_rows
from outrider.engine.proposer import Proposer
from outrider.engine.rejection import DraftBlock, Verdict, accept_by_rejection, accept_matching, point_mass_block
from outrider.engine.sampling import NoisePurpose, draw, filtered_probs, gumbel_noise, gumbel_noise_of, uniforms
from outrider.models.attention import LayerCaches
from outrider.models.gemma import GemmaTarget


@dataclass(frozen=True)
class CycleResult:
    """What a cycle decided, still on the device."""

    draft: DraftBlock
    verdict: Verdict
    is_finite: Tensor  # bool [Q]: a request's logits held no NaN


def run_cycle(
    batch: CycleBatch,
    *,
    target: GemmaTarget,
    caches: LayerCaches,
    proposer: Proposer | None,
    rows_per_pass: int | None,
) -> CycleResult:
    """Advance every request of the batch by its accepted drafts and one token of the target's own."""
    draft_length = max(batch.host_lengths)
    if proposer is not None and draft_length > 0:
        draft = proposer.propose(batch, draft_length)
    else:
        draft = point_mass_block(batch.seats.new_empty(len(batch.seats), 0), target.dtype)

    packed = pack_rows(batch, draft.token_ids, rows_per_pass=rows_per_pass)
    output = target.forward(packed.rows, caches, tap_layers=proposer.tap_layers if proposer else ())

    verdict, is_finite = accept(batch, draft, target, output.hidden, packed.row_index)

    if proposer is not None and output.taps is not None:
        became_text = packed.slots <= verdict.num_accepted_tokens[packed.owners]
        proposer.commit(output.taps, torch.where(became_text, packed.rows.seats, -1), packed.rows.positions)
    return CycleResult(draft, verdict, is_finite)


def accept(
    batch: CycleBatch, draft: DraftBlock, target: GemmaTarget, hidden: Tensor, row_index: Tensor
) -> tuple[Verdict, Tensor]:
    """Judge drafts by the target's last hidden states [R, N], each request by its own rule: verdict, is_finite [Q].

    row_index int64 [Q, K + 1] finds a request's rows. A batch of greedy requests needs no logits, only the best ids.
    """
    is_sampled = [request for request, params in enumerate(batch.params) if not params.is_greedy]
    if not is_sampled:
        best_values, best_ids = target.best(hidden)
        verdict = accept_matching(draft.token_ids, best_ids[row_index], batch.draft_lengths)
        return verdict, torch.isfinite(best_values[row_index]).all(dim=1)  # a NaN in a row is its best value
    logits = target.logits(hidden)
    is_finite = torch.isfinite(logits.amax(dim=-1)[row_index]).all(dim=1)
    chosen = row_index.new_zeros(row_index.shape)
    for request, params in enumerate(batch.params):
        rows = logits[row_index[request]]
        if params.is_greedy:
            chosen[request] = rows.argmax(dim=-1)
        elif params.seed is not None:
            chosen[request] = match_choices(batch, request, rows)
    verdict = accept_matching(draft.token_ids, chosen, batch.draft_lengths)
    for request in is_sampled:
        if batch.params[request].seed is None:
            num_accepted, token_id = reject_or_keep(batch, request, draft, logits[row_index[request]])
            verdict.num_accepted_tokens[request], verdict.target_token_ids[request] = num_accepted, token_id
    return verdict, is_finite


def match_choices(batch: CycleBatch, request: int, logits: Tensor) -> Tensor:
    """The target's own sample for each row [K + 1, V] of a seeded request; noise depends on seed and position alone."""
    params, seed, anchor = batch.params[request], batch.noise_seeds[request], batch.host_positions[request]
    choices = []
    for slot, row in enumerate(logits[: batch.host_lengths[request] + 1]):
        probs, position = filtered_probs(row, params), anchor + 1 + slot
        ids = probs.nonzero().squeeze(-1)
        # One id alone costs as much noise as the four of its block.
        is_few = 4 * len(ids) < len(row)
        noise = (
            gumbel_noise_of(seed, position, ids) if is_few else gumbel_noise(seed, position, len(row), row.device)[ids]
        )
        choices.append(ids[(probs[ids].to(torch.float64).log() + noise).argmax()])
    choices += [choices[-1]] * (len(logits) - len(choices))
    return torch.stack(choices)


def reject_or_keep(batch: CycleBatch, request: int, draft: DraftBlock, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection sampling for one request with rows [K + 1, V]: (num_accepted, target token), int64 scalars."""
    params, one, device = batch.params[request], slice(request, request + 1), logits.device
    seed, anchor, num_drafts = batch.noise_seeds[request], batch.host_positions[request], draft.token_ids.shape[1]
    num_accepted, left = accept_by_rejection(
        DraftBlock(draft.token_ids[one], draft.candidate_ids[one], draft.candidate_probs[one]),
        torch.stack([filtered_probs(row, params) for row in logits])[None],
        batch.draft_lengths[one],
        uniforms(seed, anchor, num_drafts, NoisePurpose.ACCEPT, device=device)[None],
    )
    token_id = draw(left[0], uniforms(seed, anchor, 1, NoisePurpose.TARGET, device=device)[0])
    return num_accepted[0], token_id
