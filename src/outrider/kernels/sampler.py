"""Sampled rows as functions of tensors: what a sampler must offer, and its plain torch twin.

Rows are filtered, chosen from and judged without reading anything back, so that a cycle of sampled requests can be
captured (design §4.1). Filters are thresholds on a row's own logits: tokens that tie stay or go together.
`engine/sampling.py` is the same rule for one row at a time, and what a CPU runs.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.kernels.noise import NoisePurpose, gumbel_of_ids, philox, uniform_of


class Sampling(NamedTuple):
    """How each of Q requests, or of R rows, is sampled; fields as in `SamplingParams`."""

    temperatures: Tensor  # float64; 0 is greedy, and the rest does not matter then
    top_ks: Tensor  # int64; 0 keeps all
    top_ps: Tensor  # float64
    min_ps: Tensor  # float64
    seeds: Tensor  # int64: key of the noise
    are_seeded: Tensor  # int64; 1 has the noise of a token depend on its place alone (match sampling)

    def of(self, owners: Tensor, is_live: Tensor) -> Sampling:
        """Of rows int64 [R] that belong to these requests; a row that is not live is greedy."""
        rows = Sampling(*(field[owners] for field in self))
        return rows._replace(temperatures=torch.where(is_live, rows.temperatures, 0.0))

    @property
    def are_rejected(self) -> Tensor:
        """True where drafts are judged by rejection sampling; the others keep what equals the target's choice."""
        return (self.temperatures > 0) & (self.are_seeded == 0)


class RowFilters(NamedTuple):
    """What top-k, top-p and min-p leave of R rows of logits."""

    thresholds: Tensor  # [R]: logits not below it are kept; -inf where all are
    largest: Tensor  # [R]
    totals: Tensor  # float64 [R]: sum over kept logits of exp((logit - largest) / temperature); 0 for a greedy row


class Drafted(NamedTuple):
    """Drafts of Q requests that stand for judgement, each drawn from its candidates."""

    token_ids: Tensor  # int64 [Q, K]
    candidate_ids: Tensor  # int64 [Q, K, C]
    candidate_probs: Tensor  # [Q, K, C]
    chances: Tensor  # [Q, K]: the drafted token's own
    lengths: Tensor  # int64 [Q]: how many count
    positions: Tensor  # int64 [Q]: of the anchors
    row_index: Tensor  # int64 [Q, K + 1]: where each request's rows of logits are


class Sampler(Protocol):
    """Operations on rows of logits [R, V]. A row's result depends on that row's own inputs only."""

    def filters(self, logits: Tensor, sampling: Sampling) -> RowFilters:
        """What is left of each row: top-k, then top-p, then min-p, after the temperature."""
        ...

    def choose(self, logits: Tensor, sampling: Sampling, filters: RowFilters, positions: Tensor) -> Tensor:
        """The target's own token for each row, int64 [R], `positions` int64 [R] being the places it is for.

        Greedy rows take the best (ties to the lowest id), seeded ones Gumbel's maximum with the noise of seed and
        place. Rows judged by rejection get 0: their choice waits for the verdict.
        """
        ...

    def reject(
        self, logits: Tensor, sampling: Sampling, filters: RowFilters, drafted: Drafted
    ) -> tuple[Tensor, Tensor]:
        """Rejection sampling (Leviathan et al. 2023): how many drafts are kept and the target's token, int64 [Q] each.

        `sampling` is of the Q requests, `filters` of the R rows. Where nothing is left over, the target is sampled as
        it is. Other requests get numbers without meaning. Logits may be overwritten: judge nothing by them afterwards.
        """
        ...

    def draw(
        self, token_ids: Tensor, logits: Tensor, sampling: Sampling, positions: Tensor, slot: int
    ) -> tuple[Tensor, Tensor]:
        """Draft one token a request in slot 0, 1, … after anchors at `positions` int64 [Q].

        Candidates int64 [Q, C] and their logits [Q, C] -> drafts int64 [Q] and the distribution they are drawn from,
        [Q, C]: filtered as a target's row, or a point mass for greedy requests.
        """
        ...


class TorchSampler:
    """The `Sampler` protocol in plain torch, by sorting."""

    def filters(self, logits: Tensor, sampling: Sampling) -> RowFilters:
        """Walk down each row from its largest logit."""
        size, is_sampled = logits.shape[1], sampling.temperatures > 0
        ordered, largest = logits.sort(dim=-1, descending=True).values, logits.amax(dim=-1)
        masses = _weights(ordered, largest[:, None], sampling.temperatures[:, None])
        by_rank = ordered.gather(1, (sampling.top_ks - 1).clamp(0, size - 1)[:, None])
        is_cut = is_sampled & (sampling.top_ks > 0) & (sampling.top_ks < size)
        thresholds = torch.where(is_cut[:, None], by_rank, -torch.inf)
        masses = torch.where(ordered >= thresholds, masses, 0.0)
        goals = sampling.top_ps[:, None] * masses.sum(dim=-1, keepdim=True)
        num_before = (masses.cumsum(dim=-1) < goals).sum(dim=-1, keepdim=True).clamp_max(size - 1)
        by_mass = torch.maximum(thresholds, ordered.gather(1, num_before))
        thresholds = torch.where((is_sampled & (sampling.top_ps < 1.0))[:, None], by_mass, thresholds).squeeze(1)
        thresholds = torch.maximum(thresholds, lowest_by_chance(largest, sampling))
        totals = torch.where(ordered >= thresholds[:, None], masses, 0.0).sum(dim=-1)
        return RowFilters(thresholds, largest, torch.where(is_sampled, totals, 0.0))

    def choose(self, logits: Tensor, sampling: Sampling, filters: RowFilters, positions: Tensor) -> Tensor:
        """All rows of the vocabulary at once."""
        ids = torch.arange(logits.shape[1], device=logits.device).expand(len(logits), -1)
        noise = gumbel_of_ids(sampling.seeds[:, None], positions[:, None], ids, NoisePurpose.MATCH)
        is_greedy = (sampling.temperatures == 0)[:, None]
        scores = logits.double() / torch.where(is_greedy, 1.0, sampling.temperatures[:, None])
        scores = scores + torch.where(is_greedy, 0.0, noise)
        is_kept = logits >= filters.thresholds[:, None]
        choices = torch.where(is_kept, scores, -torch.inf).argmax(dim=1)
        return torch.where(sampling.are_rejected, 0, choices)

    def reject(
        self, logits: Tensor, sampling: Sampling, filters: RowFilters, drafted: Drafted
    ) -> tuple[Tensor, Tensor]:
        """All rows of the vocabulary at once."""
        num_drafts, requests = drafted.token_ids.shape[1], torch.arange(len(drafted.lengths), device=logits.device)
        slots = torch.arange(num_drafts, device=logits.device)
        rows, seeds, positions = drafted.row_index, sampling.seeds[:, None], drafted.positions[:, None]
        at_drafts = logits[rows[:, :-1], drafted.token_ids]
        chances = _chances(at_drafts, filters, rows[:, :-1], sampling.temperatures[:, None])
        uniforms = uniform_of(philox(seeds, (slots, positions, int(NoisePurpose.ACCEPT), slots * 0))[0])
        is_kept = (uniforms * drafted.chances < chances) & (slots < drafted.lengths[:, None])
        num_accepted = is_kept.long().cumprod(dim=1).sum(dim=1)
        last_rows = rows.gather(1, num_accepted[:, None])
        probs = _chances(logits[last_rows.squeeze(1)], filters, last_rows, sampling.temperatures[:, None])
        if num_drafts:
            at = num_accepted.clamp_max(num_drafts - 1)
            taken = torch.where((num_accepted < drafted.lengths)[:, None], drafted.candidate_probs[requests, at], 0.0)
            left = probs.scatter_add(1, drafted.candidate_ids[requests, at], -taken.double()).clamp_min(0.0)
            probs = torch.where(left.sum(dim=1, keepdim=True) > 0, left, probs)
        ids = torch.arange(logits.shape[1], device=logits.device).expand(len(requests), -1)
        noise = gumbel_of_ids(seeds, positions, ids, NoisePurpose.TARGET)
        return num_accepted, (probs.log() + noise).argmax(dim=1)

    def draw(
        self, token_ids: Tensor, logits: Tensor, sampling: Sampling, positions: Tensor, slot: int
    ) -> tuple[Tensor, Tensor]:
        """Gumbel's maximum over the candidates."""
        filters, is_seeded = self.filters(logits, sampling), sampling.are_seeded == 1
        places = torch.where(is_seeded, positions + 1 + slot, positions)[:, None]
        purposes = torch.where(is_seeded, int(NoisePurpose.MATCH), int(NoisePurpose.DRAFT))[:, None]
        slots = torch.where(is_seeded, 0, slot)[:, None]
        weights = _weights(logits, filters.largest[:, None], sampling.temperatures[:, None])
        weights = torch.where(logits >= filters.thresholds[:, None], weights, 0.0)
        noise = gumbel_of_ids(sampling.seeds[:, None], places, token_ids, purposes, slots)
        is_greedy = (sampling.temperatures == 0)[:, None]
        chosen = torch.where(is_greedy, logits.double(), weights.log() + noise).argmax(dim=1, keepdim=True)
        point = torch.zeros_like(weights).scatter_(1, chosen, 1.0)
        probs = torch.where(is_greedy, point, weights / weights.sum(dim=1, keepdim=True))
        return token_ids.gather(1, chosen).squeeze(1), probs.to(logits.dtype)


def lowest_by_chance(largest: Tensor, sampling: Sampling) -> Tensor:
    """The least logit [R] whose chance is min_p times that of the largest [R]; -inf for greedy rows."""
    lowest = largest.double() + sampling.temperatures * sampling.min_ps.log()
    return torch.where(sampling.temperatures > 0, lowest, -torch.inf).to(largest.dtype)


def _weights(logits: Tensor, largest: Tensor, temperatures: Tensor) -> Tensor:
    """exp((logit - largest) / temperature), float64; with 1 for a greedy row's temperature."""
    return ((logits.double() - largest.double()) / torch.where(temperatures > 0, temperatures, 1.0)).exp()


def _chances(logits: Tensor, filters: RowFilters, rows: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities of some logits of the rows, all of a shape that broadcasts, float64."""
    weights = _weights(logits, filters.largest[rows], temperatures) / filters.totals[rows]
    return torch.where(logits >= filters.thresholds[rows], weights, 0.0)
