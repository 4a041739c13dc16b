"""Who proposes drafts. The cycle knows this interface and nothing of what is behind it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.batch import Anchors, CycleBatch
from outrider.engine.grammar import LegalDrafts
from outrider.engine.rejection import DraftBlock, point_mass_block
from outrider.engine.sampling import draw, filtered_probs, gumbel_noise_of, uniforms
from outrider.errors import DrafterFault
from outrider.kernels.noise import NoisePurpose
from outrider.kernels.ops import Kernels
from outrider.kernels.sampler import Sampling
from outrider.kernels.walk import WalkStarts, stacked
from outrider.models.attention import LayerCaches
from outrider.models.dflash import DFlashDrafter
from outrider.models.draft_layers import BlockRows
from outrider.models.dspark import BlockWalk

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


@runtime_checkable
class ReplayableProposer(Protocol):
    """A proposer whose drafts are a function of tensors, which a device can replay without the host."""

    num_candidates: int  # of a sampled draft

    def propose_on_device(self, anchors: Anchors, draft_length: int, sampling: Sampling | None = None) -> DraftBlock:
        """Drafts for requests without a grammar; data decides no shape.

        `sampling` None means that all are greedy: they get the drafts of `propose`, and only ids are read. With it
        drafts have `num_candidates` each. A spare request (seat -1) gets drafts that nobody reads.
        """
        ...


class FencedProposer:
    """Any proposer; whatever it raises becomes a DrafterFault, which costs the engine its drafts and no request."""

    def __init__(self, proposer: Proposer) -> None:
        self.inner, self.name = proposer, proposer.name
        self.max_draft_length, self.default_draft_length = proposer.max_draft_length, proposer.default_draft_length
        self.tap_layers = proposer.tap_layers

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        """As the proposer inside."""
        try:
            return self.inner.propose(batch, draft_length)
        except Exception as error:
            raise DrafterFault(f"drafter {self.name} failed to draft: {error!r}") from error

    @property
    def num_candidates(self) -> int:
        """As the proposer inside, which must be a ReplayableProposer."""
        assert isinstance(self.inner, ReplayableProposer)
        return self.inner.num_candidates

    def propose_on_device(self, anchors: Anchors, draft_length: int, sampling: Sampling | None = None) -> DraftBlock:
        """As the proposer inside, which must be a ReplayableProposer."""
        assert isinstance(self.inner, ReplayableProposer)
        try:
            return self.inner.propose_on_device(anchors, draft_length, sampling)
        except Exception as error:
            raise DrafterFault(f"drafter {self.name} failed to draft: {error!r}") from error

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        """As the proposer inside."""
        try:
            self.inner.commit(taps, seats, positions)
        except Exception as error:
            raise DrafterFault(f"drafter {self.name} failed to take context: {error!r}") from error


class DFlashProposer:
    """Drafts with a block drafter; its context cache is a pure function of the taps of committed tokens."""

    def __init__(self, drafter: DFlashDrafter, caches: LayerCaches) -> None:
        self.drafter, self.caches = drafter, caches
        self.name = drafter.config.name
        self.max_draft_length = drafter.config.max_draft_length
        self.default_draft_length = drafter.config.num_speculative_tokens
        self.tap_layers = drafter.config.target_layer_ids
        self.num_candidates = min(MAX_CANDIDATES, drafter.config.draft_vocab_size)

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        """One block pass, and where a slot's draft needs the one before it, or a draw, a walk over its slots."""
        if all(params.is_greedy for params in batch.params) and not batch.has_constraints:
            return self.propose_on_device(batch, draft_length)
        block = self._block(batch, draft_length)
        return walked(batch, self.drafter.walk(block, self.caches, num_candidates=MAX_CANDIDATES))

    def propose_on_device(self, anchors: Anchors, draft_length: int, sampling: Sampling | None = None) -> DraftBlock:
        """The likeliest draft of every slot, or a draw, given the one before it where the drafter has heads."""
        block = self._block(anchors, draft_length)
        if self.drafter.has_heads or sampling is not None:
            walk = self.drafter.walk(block, self.caches, num_candidates=MAX_CANDIDATES)
            return walked_by_tensors(anchors, walk, self.drafter.kernels, sampling)
        draft_ids, table = self.drafter.best(block, self.caches), self.drafter.draft_to_target
        return point_mass_block(draft_ids if table is None else table[draft_ids], self.drafter.target.dtype)

    def _block(self, anchors: Anchors, draft_length: int) -> BlockRows:
        return self.drafter.block(
            anchors.anchor_token_ids,
            anchors.seats,
            anchors.anchor_positions,
            num_drafts=draft_length,
            draft_lengths=anchors.draft_lengths,
        )

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Append context keys and values."""
        self.drafter.write_context(taps, seats, positions, self.caches)


def is_replayable(proposer: Proposer | None) -> bool:
    """True where drafts can be a function of tensors; a fence does not count, nor does having none."""
    inner = proposer.inner if isinstance(proposer, FencedProposer) else proposer
    return inner is None or isinstance(inner, ReplayableProposer)


def walked_by_tensors(
    anchors: Anchors, walk: BlockWalk, kernels: Kernels, sampling: Sampling | None = None
) -> DraftBlock:
    """`walked` for requests without a grammar, with nothing read back; noise of unseeded requests is its own.

    Without `sampling` all are greedy, and get the best candidate of every slot.
    """
    starts = WalkStarts(anchors.anchor_token_ids, anchors.seats, anchors.anchor_positions)
    token_ids, candidate_ids, candidate_probs, chances = kernels.walk(walk, starts, sampling)
    if candidate_ids is None or candidate_probs is None:
        return point_mass_block(token_ids, walk.logits.dtype)._replace(confidences=chances)
    return DraftBlock(token_ids, candidate_ids, candidate_probs, chances)


def walked(batch: CycleBatch, walk: BlockWalk) -> DraftBlock:
    """Drafts drawn slot by slot, each request by its own rule; greedy requests in the batch are point masses.

    A request with a grammar draws from the candidates that are legal there; its draft ends where none is.
    """
    previous, slots, chances, legal = batch.anchor_token_ids, [], [], LegalDrafts(batch.constraints)
    for slot in range(walk.num_drafts):
        ids, logits, chance = walk.step(previous)
        logits = legal.mask(ids, logits)
        probs = torch.stack([candidate_probs(row, params) for row, params in zip(logits, batch.params, strict=True)])
        chosen = torch.stack([choose(batch, request, slot, ids[request], row) for request, row in enumerate(probs)])
        previous = ids.gather(1, chosen[:, None]).squeeze(1)
        legal.take(previous)
        slots.append((previous, ids, probs))
        chances.append(chance)
    token_ids, kept_ids, kept_probs = (torch.stack(parts, dim=1) for parts in zip(*slots, strict=True))
    return DraftBlock(token_ids, kept_ids, kept_probs, stacked(chances), legal.finish(walk.num_drafts))


def choose(batch: CycleBatch, request: int, slot: int, ids: Tensor, probs: Tensor) -> Tensor:
    """Index of the drafted candidate among ids int64 [C] with probs [C]."""
    params = batch.params[request]
    if params.is_greedy:
        return probs.argmax()
    seed, anchor = batch.noise_seeds[request], batch.host_positions[request]
    if params.seed is not None:
        return (probs.to(torch.float64).log() + gumbel_noise_of(seed, anchor + 1 + slot, ids)).argmax()
    return draw(probs, uniforms(seed, anchor, 1, NoisePurpose.DRAFT, first_slot=slot, device=ids.device)[0])


def candidate_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Draft distribution of one slot over its candidates [C]: filtered as the target's, or a point mass."""
    if params.is_greedy:
        point = torch.zeros_like(logits)
        point[logits.argmax()] = 1.0
        return point
    return filtered_probs(logits, params)
