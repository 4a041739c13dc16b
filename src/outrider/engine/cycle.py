"""One cycle: draft → choose → verify → accept → commit. This file is that picture and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core import TokenLogprobs
from outrider.engine.adjustments import adjusted_rows
from outrider.engine.batch import Anchors, CycleBatch, PackedRows, pack_rows
from outrider.engine.logprobs import raw_logprobs
from outrider.engine.proposer import Proposer
from outrider.engine.rejection import (
    ACCEPTANCE_RULES,
    DraftBlock,
    Verdict,
    accept_matching,
    draft_chance,
    point_mass_block,
)
from outrider.engine.sampling import (
    draw,
    filtered_probs,
    gumbel_noise,
    gumbel_noise_of,
    sampling_numbers,
    sampling_of,
    uniforms,
)
from outrider.kernels.noise import NoisePurpose
from outrider.kernels.sampler import Drafted, Sampler, Sampling
from outrider.models.attention import LayerCaches
from outrider.models.gemma import GemmaTarget


class Judged(NamedTuple):
    """What the target made of the drafts, tensors still on the device."""

    verdict: Verdict
    is_finite: Tensor  # bool [Q]: a request's logits held no NaN
    logprobs: list[tuple[TokenLogprobs, ...]]  # of accepted drafts and the target's token; empty if not asked for


class Decided(NamedTuple):
    """What a cycle decided for each of its requests, on the host."""

    num_accepted_tokens: list[int]
    target_token_ids: list[int]
    is_finite: list[bool]
    draft_token_ids: list[list[int]]  # K a request, of which the first accepted ones are text
    draft_lengths: Sequence[int]
    logprobs: Sequence[tuple[TokenLogprobs, ...]]


@dataclass(frozen=True)
class CycleResult:
    """What a cycle decided."""

    batch: CycleBatch  # with the drafts that were verified
    draft: DraftBlock
    judged: Judged

    def read(self) -> Decided:
        """The one read-back of a cycle."""
        (num_accepted, targets), is_finite, logprobs = self.judged
        drafts, lengths = self.draft.token_ids.tolist(), self.batch.host_lengths
        return Decided(num_accepted.tolist(), targets.tolist(), is_finite.tolist(), drafts, lengths, logprobs)


def run_cycle(
    batch: CycleBatch,
    *,
    target: GemmaTarget,
    caches: LayerCaches,
    proposer: Proposer | None,
    rows_per_pass: int | None,
    acceptance: str = "rejection",
) -> CycleResult:
    """Advance every request of the batch by its accepted drafts and one token of the target's own."""
    draft_length = max(batch.host_lengths)
    if proposer is not None and draft_length > 0:
        draft = proposer.propose(batch, draft_length)
        batch = batch if draft.lengths is None else batch.cut(draft.lengths)
    else:
        draft = point_mass_block(batch.seats.new_empty(len(batch.seats), 0), target.dtype)

    def judge(hidden: Tensor, packed: PackedRows) -> Judged:
        return accept(batch, draft, target, hidden, packed.row_index, acceptance=acceptance)

    num_rows = max(batch.num_rows, rows_per_pass or 0)
    judged = verify(batch, draft.token_ids, judge, num_rows=num_rows, target=target, caches=caches, proposer=proposer)
    return CycleResult(batch, draft, judged)


def verify(
    anchors: Anchors,
    draft_token_ids: Tensor,
    judge: Callable[[Tensor, PackedRows], Judged],
    *,
    num_rows: int,
    target: GemmaTarget,
    caches: LayerCaches,
    proposer: Proposer | None,
    after_first_layers: Callable[[], None] | None = None,
) -> Judged:
    """The target over anchors and drafts int64 [Q, K] in so many rows, a verdict on them, and what became text kept.

    `judge` gets hidden states [R, N] and whose rows they are. With a judge that is a function of tensors
    (`accept_best`, `accept_sampled`), this is one.
    """
    packed = pack_rows(anchors, draft_token_ids, num_rows=num_rows)
    tap_layers = proposer.tap_layers if proposer else ()
    output = target.forward(packed.rows, caches, tap_layers=tap_layers, after_first_layers=after_first_layers)

    judged = judge(output.hidden, packed)

    if proposer is not None and output.taps is not None:
        became_text = packed.slots <= judged.verdict.num_accepted_tokens[packed.owners]
        proposer.commit(output.taps, torch.where(became_text, packed.rows.seats, -1), packed.rows.positions)
    return judged


def accept_best(
    anchors: Anchors, draft_token_ids: Tensor, target: GemmaTarget, hidden: Tensor, row_index: Tensor
) -> Judged:
    """Judge drafts int64 [Q, K] of plain greedy requests: the best ids are enough, and no logits are kept."""
    best_values, best_ids = target.best(hidden)
    verdict = accept_matching(
        draft_token_ids, best_ids[row_index], anchors.draft_lengths, planned_counts=anchors.planned_counts
    )
    is_finite = torch.isfinite(best_values[row_index]).all(dim=1)  # a NaN in a row is its best value
    return Judged(verdict, is_finite, [()] * len(anchors.seats))


def accept_sampled(
    anchors: Anchors, sampling: Sampling, draft: DraftBlock, target: GemmaTarget, hidden: Tensor, packed: PackedRows
) -> Judged:
    """Judge drafts of requests that ask for temperature and filters at most, each by its own rule; nothing is read."""
    logits, sampler, row_index = target.logits(hidden), target.kernels.sampler, packed.row_index
    rows = sampling.of(packed.owners, packed.rows.seats >= 0)
    filters = sampler.filters(logits, rows)
    chosen = sampler.choose(logits, rows, filters, packed.rows.positions + 1)[row_index]
    matched = accept_matching(draft.token_ids, chosen, anchors.draft_lengths, planned_counts=anchors.planned_counts)
    drafted = Drafted(*draft[:3], draft_chance(draft), anchors.draft_lengths, anchors.anchor_positions, row_index)
    rejected = sampler.reject(logits, sampling, filters, drafted)  # the last to read the logits
    pairs = zip(rejected, matched, strict=True)
    verdict = Verdict(*(torch.where(sampling.are_rejected, ours, other) for ours, other in pairs))
    return Judged(verdict, torch.isfinite(filters.largest[row_index]).all(dim=1), [()] * len(anchors.seats))


def accept(
    batch: CycleBatch,
    draft: DraftBlock,
    target: GemmaTarget,
    hidden: Tensor,
    row_index: Tensor,
    *,
    acceptance: str = "rejection",
) -> Judged:
    """Judge drafts by the target's last hidden states [R, N], each request by its own rule.

    row_index int64 [Q, K + 1] finds a request's rows. Plain greedy requests alone need no logits, only the best ids.
    """
    if not batch.needs_logits:
        return accept_best(batch, draft.token_ids, target, hidden, row_index)
    logits = target.logits(hidden)
    is_finite = torch.isfinite(logits.amax(dim=-1)[row_index]).all(dim=1)
    raw_rows = [[logits[row] for row in index] for index in row_index.tolist()]  # views, no copies
    rows = [adjusted_request_rows(batch, request, draft, raw_rows[request]) for request in range(len(raw_rows))]
    chosen = row_index.new_zeros(row_index.shape)
    for request, params in enumerate(batch.params):
        if params.is_greedy:
            chosen[request] = torch.stack([row.argmax() for row in rows[request]])
        elif params.seed is not None and logits.is_cuda:
            chosen[request] = match_choices_on_device(batch, request, rows[request], target.kernels.sampler)
        elif params.seed is not None:
            chosen[request] = match_choices(batch, request, rows[request])
    verdict = accept_matching(draft.token_ids, chosen, batch.draft_lengths, planned_counts=batch.planned_counts)
    for request, params in enumerate(batch.params):
        if not params.is_greedy and params.seed is None:
            num_accepted, token_id = reject_or_keep(batch, request, draft, rows[request], acceptance)
            verdict.num_accepted_tokens[request], verdict.target_token_ids[request] = num_accepted, token_id
    logprobs = [emitted_logprobs(batch, request, draft, verdict, raw) for request, raw in enumerate(raw_rows)]
    return Judged(verdict, is_finite, logprobs)


def adjusted_request_rows(batch: CycleBatch, request: int, draft: DraftBlock, rows: list[Tensor]) -> list[Tensor]:
    """K + 1 rows [V] of one request as its adjustments and its grammar want them."""
    adjustments, constraint = batch.adjustments[request], batch.constraint(request)
    if adjustments is None and constraint is None:
        return rows
    draft_token_ids, adjusted = draft.token_ids[request, : batch.host_lengths[request]].tolist(), rows
    if adjustments is not None:
        adjusted = adjusted_rows(adjustments, rows, batch.outputs[request], draft_token_ids)
    return adjusted if constraint is None else constraint.legal_rows(adjusted, rows, draft_token_ids)


def emitted_logprobs(
    batch: CycleBatch, request: int, draft: DraftBlock, verdict: Verdict, raw_rows: list[Tensor]
) -> tuple[TokenLogprobs, ...]:
    """One entry for each token that a request gets from this cycle, if it asked for them."""
    num_top = batch.params[request].logprobs
    if num_top is None:
        return ()
    num_accepted = int(verdict.num_accepted_tokens[request])
    token_ids = [*draft.token_ids[request, :num_accepted].tolist(), int(verdict.target_token_ids[request])]
    return raw_logprobs(raw_rows[: num_accepted + 1], token_ids, num_top)


def match_choices_on_device(batch: CycleBatch, request: int, rows: list[Tensor], sampler: Sampler) -> Tensor:
    """`match_choices` by the operations of `accept_sampled`: the same bits, whoever shares the batch."""
    num_rows, anchor, device = batch.host_lengths[request] + 1, batch.host_positions[request], rows[0].device
    whole, fractions = sampling_numbers(batch.params[request], batch.noise_seeds[request])
    sampling = sampling_of(
        torch.tensor(whole, device=device)[:, None].repeat(1, num_rows),
        torch.tensor(fractions, dtype=torch.float64, device=device)[:, None].repeat(1, num_rows),
    )
    logits, positions = torch.stack(rows[:num_rows]), torch.arange(anchor + 1, anchor + 1 + num_rows, device=device)
    choices = sampler.choose(logits, sampling, sampler.filters(logits, sampling), positions)
    return torch.cat([choices, choices[-1:].expand(len(rows) - num_rows)])


def match_choices(batch: CycleBatch, request: int, rows: list[Tensor]) -> Tensor:
    """The target's own sample for each of K + 1 rows [V] of a seeded request; noise depends on seed and place alone."""
    params, seed, anchor = batch.params[request], batch.noise_seeds[request], batch.host_positions[request]
    choices = []
    for slot, row in enumerate(rows[: batch.host_lengths[request] + 1]):
        probs, position = filtered_probs(row, params), anchor + 1 + slot
        ids = probs.nonzero().squeeze(-1)
        # One id alone costs as much noise as the four of its block.
        is_few = 4 * len(ids) < len(row)
        noise = (
            gumbel_noise_of(seed, position, ids) if is_few else gumbel_noise(seed, position, len(row), row.device)[ids]
        )
        choices.append(ids[(probs[ids].to(torch.float64).log() + noise).argmax()])
    choices += [choices[-1]] * (len(rows) - len(choices))
    return torch.stack(choices)


def reject_or_keep(
    batch: CycleBatch, request: int, draft: DraftBlock, rows: list[Tensor], acceptance: str
) -> tuple[int, Tensor]:
    """The named rule for one sampled request with K + 1 rows [V]: (num_accepted, target token int64 scalar)."""
    params, device = batch.params[request], rows[0].device
    seed, anchor, num_drafts = batch.noise_seeds[request], batch.host_positions[request], batch.host_lengths[request]
    num_accepted, left = ACCEPTANCE_RULES[acceptance](
        draft.of(request, num_drafts),
        lambda slot: filtered_probs(rows[slot], params),
        uniforms(seed, anchor, num_drafts, NoisePurpose.ACCEPT, device=device),
    )
    return num_accepted, draw(left, uniforms(seed, anchor, 1, NoisePurpose.TARGET, device=device)[0])
