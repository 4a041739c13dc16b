"""One cycle: draft → choose → verify → accept → commit. This file is that picture and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.batch import CycleBatch, pack_rows
from outrider.engine.proposer import Proposer
from outrider.engine.rejection import DraftBlock, Verdict, accept_by_rejection, accept_matching, point_mass_block
from outrider.engine.sampling import NoisePurpose, draw, filtered_probs, gumbel_noise, uniforms
from outrider.models.attention import LayerCache
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
    caches: Sequence[LayerCache],
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
    logits = target.logits(output.hidden)

    verdict, is_finite = accept(batch, draft, logits, packed.row_index)

    if proposer is not None and output.taps is not None:
        became_text = packed.slots <= verdict.num_accepted_tokens[packed.owners]
        proposer.commit(output.taps, torch.where(became_text, packed.rows.seats, -1), packed.rows.positions)
    return CycleResult(draft, verdict, is_finite)


def accept(batch: CycleBatch, draft: DraftBlock, logits: Tensor, row_index: Tensor) -> tuple[Verdict, Tensor]:
    """Judge drafts by logits [R, V], each request by its own rule; row_index int64 [Q, K + 1] finds its rows."""
    best = logits.max(dim=-1)  # ties go to the lowest id; a NaN in a row is its maximum
    chosen = best.indices[row_index]
    is_finite = torch.isfinite(best.values[row_index]).all(dim=1)
    for request, params in enumerate(batch.params):
        if not params.is_greedy and params.seed is not None:
            chosen[request] = match_choices(batch, request, logits[row_index[request]])
    verdict = accept_matching(draft.token_ids, chosen, batch.draft_lengths)
    by_rejection = [i for i, p in enumerate(batch.params) if not p.is_greedy and p.seed is None]
    for request in by_rejection:
        num_accepted, token_id = reject_or_keep(batch, request, draft, logits[row_index[request]])
        verdict.num_accepted_tokens[request], verdict.target_token_ids[request] = num_accepted, token_id
    return verdict, is_finite


def match_choices(batch: CycleBatch, request: int, logits: Tensor) -> Tensor:
    """The target's own sample for each row [K + 1, V] of a seeded request; noise depends on seed and position alone."""
    params, seed, anchor = batch.params[request], batch.noise_seeds[request], batch.host_positions[request]
    choices = []
    for slot, row in enumerate(logits[: batch.host_lengths[request] + 1]):
        noise = gumbel_noise(seed, anchor + 1 + slot, row.shape[0], row.device)
        choices.append((filtered_probs(row, params).to(torch.float64).log() + noise).argmax())
    choices += [choices[-1]] * (len(logits) - len(choices))
    return torch.stack(choices)


def reject_or_keep(batch: CycleBatch, request: int, draft: DraftBlock, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection sampling for one request with rows [K + 1, V]: (num_accepted, target token), int64 scalars."""
    params, one = batch.params[request], slice(request, request + 1)
    probs = torch.stack([filtered_probs(row, params) for row in logits])[None]
    num_drafts = draft.token_ids.shape[1]
    slots = torch.arange(num_drafts + 1, device=logits.device)
    seeds = torch.full_like(slots, batch.noise_seeds[request])
    anchors = torch.full_like(slots, batch.host_positions[request])
    num_accepted, left = accept_by_rejection(
        DraftBlock(draft.token_ids[one], draft.candidate_ids[one], draft.candidate_probs[one]),
        probs,
        batch.draft_lengths[one],
        uniforms(seeds, anchors, slots, NoisePurpose.ACCEPT)[None, :num_drafts],
    )
    token_id = draw(left[0], uniforms(seeds[:1], anchors[:1], slots[:1], NoisePurpose.TARGET)[0])
    return num_accepted[0], token_id
