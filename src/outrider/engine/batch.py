"""The tensors of one cycle: which requests take part and where each one's rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.adjustments import Adjustments, asks_for_logits
from outrider.engine.grammar import Constraint
from outrider.engine.state import RequestState
from outrider.models.attention import Rows


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Where Q requests stand before a cycle, as tensors on the engine's device: all that a greedy cycle needs to know.

    A spare request has seat -1 and draft length -1: it has no row.
    """

    seats: Tensor  # int64 [Q]
    anchor_token_ids: Tensor  # int64 [Q]
    anchor_positions: Tensor  # int64 [Q]
    draft_lengths: Tensor  # int64 [Q]: drafts of each request that are verified
    planned_counts: Tensor | None = None  # int64 [Q]: drafts to keep come what may; -1 leaves it to the target


@dataclass(frozen=True, kw_only=True)
class CycleBatch(Anchors):
    """Q live requests before a cycle. Tensors are on the engine's device; tuples are the host's own copy."""

    host_positions: tuple[int, ...]
    host_lengths: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    noise_seeds: tuple[int, ...]
    adjustments: tuple[Adjustments | None, ...]
    outputs: tuple[Sequence[int], ...]  # tokens generated so far, anchor last: the requests' own lists, not copies
    constraints: tuple[Constraint | None, ...] = ()  # one a request, or none at all

    @staticmethod
    def of(requests: Sequence[RequestState], lengths: Sequence[int], device: torch.device) -> CycleBatch:
        """Gather the live requests, in order, with so many drafts each."""
        positions = tuple(request.anchor_position for request in requests)
        planned = [request.planned_count for request in requests]
        return CycleBatch(
            seats=torch.tensor([request.seat for request in requests], device=device),
            anchor_token_ids=torch.tensor([request.anchor_token_id for request in requests], device=device),
            anchor_positions=torch.tensor(positions, device=device),
            draft_lengths=torch.tensor(lengths, device=device),
            planned_counts=torch.tensor(planned, device=device) if max(planned) >= 0 else None,
            host_positions=positions,
            host_lengths=tuple(lengths),
            params=tuple(request.params for request in requests),
            noise_seeds=tuple(request.noise_seed for request in requests),
            adjustments=tuple(request.adjustments for request in requests),
            outputs=tuple(request.output_token_ids for request in requests),
            constraints=tuple(request.constraint for request in requests),
        )

    @staticmethod
    def at_prompt_end(request: RequestState, device: torch.device) -> CycleBatch:
        """A batch of one whose only row is the last of its prompt: it chooses the first token."""
        position = len(request.prompt_token_ids) - 1
        return CycleBatch(
            seats=torch.tensor([request.seat], device=device),
            anchor_token_ids=torch.tensor([request.prompt_token_ids[-1]], device=device),
            anchor_positions=torch.tensor([position], device=device),
            draft_lengths=torch.zeros(1, dtype=torch.int64, device=device),
            host_positions=(position,),
            host_lengths=(0,),
            params=(request.params,),
            noise_seeds=(request.noise_seed,),
            adjustments=(request.adjustments,),
            outputs=((),),
            constraints=(request.constraint,),
        )

    def constraint(self, request: int) -> Constraint | None:
        """The grammar of one request, if it has one."""
        return self.constraints[request] if self.constraints else None

    @property
    def has_constraints(self) -> bool:
        """True where a request has a grammar."""
        return any(constraint is not None for constraint in self.constraints)

    def cut(self, lengths: Sequence[int]) -> CycleBatch:
        """The batch with at most so many drafts for each request."""
        shorter = tuple(map(min, self.host_lengths, lengths))
        return replace(self, host_lengths=shorter, draft_lengths=torch.tensor(shorter, device=self.seats.device))

    @property
    def num_rows(self) -> int:
        """An anchor row a request, and one a draft."""
        return len(self.host_lengths) + sum(self.host_lengths)

    @property
    def needs_logits(self) -> bool:
        """False where every request takes the target's best token as it is and asks no more."""
        return self.has_constraints or any(map(asks_for_logits, self.params, self.adjustments))


@dataclass(frozen=True)
class PackedRows:
    """Rows of a verify pass, request after request (anchor, then drafts), then spare rows."""

    rows: Rows
    owners: Tensor  # int64 [R]: index into the batch; 0 for spare rows
    slots: Tensor  # int64 [R]: 0 for an anchor, j for draft j
    row_index: Tensor  # int64 [Q, K + 1]: where a request's row lies; its last row again past its draft length


def pack_rows(anchors: Anchors, draft_token_ids: Tensor, *, num_rows: int) -> PackedRows:
    """Lay out anchors and drafts int64 [Q, K] as so many rows, the last of them spare where there are fewer.

    A function of tensors: what they hold decides no shape, and nothing is read back.
    """
    device, width = anchors.seats.device, draft_token_ids.shape[1] + 1
    counts = anchors.draft_lengths + 1
    ends = counts.cumsum(0)
    firsts = ends - counts
    rows = torch.arange(num_rows, device=device)
    owners = torch.searchsorted(ends, rows, right=True)  # the first request that ends after the row
    is_live = owners < len(ends)
    owners = torch.where(is_live, owners, 0)
    slots = torch.where(is_live, rows - firsts[owners], 0)
    blocks = torch.cat([anchors.anchor_token_ids[:, None], draft_token_ids], dim=1)
    packed = Rows(
        token_ids=blocks[owners, slots],
        seats=torch.where(is_live, anchors.seats[owners], -1),
        positions=torch.where(is_live, anchors.anchor_positions[owners] + slots, 0),
    )
    reach = torch.minimum(torch.arange(width, device=device), anchors.draft_lengths.clamp_min(0)[:, None])
    return PackedRows(packed, owners, slots, (firsts[:, None] + reach).clamp_max(num_rows - 1))
