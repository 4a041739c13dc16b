"""The tensors of one cycle: which requests take part and where each one's rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.adjustments import Adjustments
from outrider.engine.grammar import Constraint
from outrider.engine.state import RequestState
from outrider.models.attention import Rows


@dataclass(frozen=True)
class CycleBatch:
    """Q live requests before a cycle. Tensors are on the engine's device; tuples are the host's own copy."""

    seats: Tensor  # int64 [Q]
    anchor_token_ids: Tensor  # int64 [Q]
    anchor_positions: Tensor  # int64 [Q]
    draft_lengths: Tensor  # int64 [Q]: drafts of each request that are verified
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
        return CycleBatch(
            seats=torch.tensor([request.seat for request in requests], device=device),
            anchor_token_ids=torch.tensor([request.anchor_token_id for request in requests], device=device),
            anchor_positions=torch.tensor(positions, device=device),
            draft_lengths=torch.tensor(lengths, device=device),
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
    def needs_logits(self) -> bool:
        """False where every request takes the target's best token as it is and asks no more."""
        return self.has_constraints or any(
            not params.is_greedy or adjustments is not None or params.logprobs is not None
            for params, adjustments in zip(self.params, self.adjustments, strict=True)
        )


@dataclass(frozen=True)
class PackedRows:
    """Rows of a verify pass, request after request (anchor, then drafts), then spare rows."""

    rows: Rows
    owners: Tensor  # int64 [R]: index into the batch; 0 for spare rows
    slots: Tensor  # int64 [R]: 0 for an anchor, j for draft j
    row_index: Tensor  # int64 [Q, K + 1]: where a request's row lies; its last row again past its draft length


def pack_rows(batch: CycleBatch, draft_token_ids: Tensor, *, rows_per_pass: int | None) -> PackedRows:
    """Lay out anchor and drafts int64 [Q, K] as rows; `rows_per_pass` pads with spare rows to a constant count."""
    device, width = batch.seats.device, draft_token_ids.shape[1] + 1
    owners: list[int] = []
    slots: list[int] = []
    row_index: list[list[int]] = []
    for owner, length in enumerate(batch.host_lengths):
        row_index.append([len(owners) + min(slot, length) for slot in range(width)])
        owners += [owner] * (length + 1)
        slots += range(length + 1)
    num_spare = max(0, (rows_per_pass or 0) - len(owners))
    is_live = torch.tensor([True] * len(owners) + [False] * num_spare, device=device)
    owner_index = torch.tensor(owners + [0] * num_spare, device=device)
    slot_index = torch.tensor(slots + [0] * num_spare, device=device)
    blocks = torch.cat([batch.anchor_token_ids[:, None], draft_token_ids], dim=1)
    rows = Rows(
        token_ids=blocks[owner_index, slot_index],
        seats=torch.where(is_live, batch.seats[owner_index], -1),
        positions=torch.where(is_live, batch.anchor_positions[owner_index] + slot_index, 0),
    )
    return PackedRows(rows, owner_index, slot_index, torch.tensor(row_index, device=device))
