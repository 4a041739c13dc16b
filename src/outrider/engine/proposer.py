"""Who proposes drafts. The cycle knows this interface and nothing of what is behind it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.rejection import DraftBlock, point_mass_block
from outrider.engine.sampling import NoisePurpose, draw, filtered_probs, gumbel_noise_of, uniforms
from outrider.models.attention import LayerCaches
from outrider.models.dflash import BlockRows, DFlashDrafter

MAX_CANDIDATES = 256  # drafts are drawn from, and stored as, the likeliest ids (design §4.3)


class Proposer(Protocol):
    """Drafts tokens and keeps the context it needs for that, one seat a request."""

    name: str
    max_draft_length: int
    default_draft_length: int
    tap_layers: tuple[int, ...]

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        """Drafts for every request of the batch; leaves its own state as it was."""
        ...

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Take the taps [R, taps * N] of rows that became text; rows with seat -1 are to be ignored."""
        ...


class DFlashProposer:
    """Drafts with a DFlash model; its context cache is a pure function of the taps of committed tokens."""

    def __init__(self, drafter: DFlashDrafter, caches: LayerCaches) -> None:
        self.drafter, self.caches = drafter, caches
        self.name = drafter.config.name
        self.max_draft_length = drafter.config.max_draft_length
        self.default_draft_length = drafter.config.num_speculative_tokens
        self.tap_layers = drafter.config.target_layer_ids

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        """One block pass over the first draft_length + 1 slots."""
        block = torch.full(
            (len(batch.seats), draft_length + 1), self.drafter.config.mask_token_id, device=batch.seats.device
        )
        block[:, 0] = batch.anchor_token_ids
        rows = BlockRows(block.view(-1), batch.seats, batch.anchor_positions, draft_length + 1)
        if all(params.is_greedy for params in batch.params):
            return point_mass_block(self._target_ids(self.drafter.best(rows, self.caches)), self.drafter.target.dtype)
        return self._sampled(batch, self.drafter.forward(rows, self.caches))

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Append context keys and values."""
        self.drafter.write_context(taps, seats, positions, self.caches)

    def _target_ids(self, draft_ids: Tensor) -> Tensor:
        table = self.drafter.draft_to_target
        return draft_ids if table is None else table[draft_ids]

    def _sampled(self, batch: CycleBatch, logits: Tensor) -> DraftBlock:
        """Each request by its own rule; greedy requests in the batch are point masses."""
        num_requests, num_drafts, width = logits.shape
        top = logits.topk(min(MAX_CANDIDATES, width), dim=-1)  # sorted: the first is the argmax
        ids = self._target_ids(top.indices)
        probs = torch.zeros_like(top.values)
        chosen = torch.zeros(num_requests, num_drafts, dtype=torch.int64, device=logits.device)
        for request, params in enumerate(batch.params):
            for slot in range(num_drafts):
                row = candidate_probs(top.values[request, slot], params)
                probs[request, slot] = row
                chosen[request, slot] = self._choose(batch, request, slot, ids[request, slot], row)
        return DraftBlock(ids.gather(2, chosen[..., None]).squeeze(2), ids, probs)

    def _choose(self, batch: CycleBatch, request: int, slot: int, ids: Tensor, probs: Tensor) -> Tensor:
        """Index of the drafted candidate."""
        params = batch.params[request]
        if params.is_greedy:
            return torch.zeros((), dtype=torch.int64, device=ids.device)
        seed, anchor = batch.noise_seeds[request], batch.host_positions[request]
        if params.seed is not None:
            return (probs.to(torch.float64).log() + gumbel_noise_of(seed, anchor + 1 + slot, ids)).argmax()
        return draw(probs, uniforms(seed, anchor, 1, NoisePurpose.DRAFT, first_slot=slot, device=ids.device)[0])


def candidate_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Draft distribution of one slot over its candidates [C], best first: filtered as the target's, or a point mass."""
    if params.is_greedy:
        point = torch.zeros_like(logits)
        point[0] = 1.0
        return point
    return filtered_probs(logits, params)
