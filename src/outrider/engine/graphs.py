"""Cycles on a device: two functions of tensors, captured once a bucket, between which the host only launches.

Data decides no shape and no branch (design §4.1): requests, drafts and rows come in buckets, and what a bucket has too
many of is spare. On CUDA the functions are captured as graphs; elsewhere they run as they are, which is their twin.
Each function has two forms: where all requests are greedy, no logits are kept.

The device itself knows where requests stand after a cycle. It begins the next one without the host, with what needs no
more than that: the drafts, or without drafts the first layers. Meanwhile the host reads, plans and launches the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import Anchors, PackedRows
from outrider.engine.cycle import Decided, Judged, accept_best, accept_sampled, verify
from outrider.engine.graph_capture import Graphs
from outrider.engine.proposer import Proposer, ReplayableProposer
from outrider.engine.rejection import DraftBlock
from outrider.engine.sampling import sampling_numbers, sampling_of
from outrider.engine.state import RequestState
from outrider.errors import DrafterFault
from outrider.kernels.sampler import Sampling
from outrider.models.attention import LayerCaches
from outrider.models.gemma import GemmaTarget

# Seat, anchor id, position, draft length, planned count; then whole numbers and fractions of `sampling_numbers`.
SPARE_REQUEST = (-1, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0)
SPARE_COLUMN = np.array(SPARE_REQUEST)[:, None]
PLACES, WHOLE, FRACTIONS = slice(0, 5), slice(5, 8), slice(8, 11)
ANCHOR_ID, POSITION = 1, 2  # rows of the table
MAX_LOGITS_BYTES = 256 << 20  # of a cycle with sampled requests, which are float32
NUM_COUNTS = 3  # of what comes back for a request before its drafts: accepted tokens, target's token, is finite


class Beginning(NamedTuple):
    """The buckets of what a cycle begins with: drafts, or the first layers over so many rows."""

    num_requests: int
    draft_length: int  # 0 without drafts
    num_rows: int  # 0 with drafts
    is_sampled: bool


@dataclass
class _Stand:
    """A request of the cycle under way: where it was when the cycle was launched, and where it will be."""

    request: RequestState
    column: int
    length: int
    seat: int
    num_preemptions: int
    next_position: int  # known once the cycle has been waited for

    @staticmethod
    def of(request: RequestState, column: int, length: int) -> _Stand:
        return _Stand(request, column, length, request.seat, request.num_preemptions, request.anchor_position)

    @property
    def holds_seat(self) -> bool:
        """True where its rows are still where they were."""
        return (self.request.seat, self.request.num_preemptions) == (self.seat, self.num_preemptions)


class DeviceCycle:
    """Cycles of requests that ask for temperature and filters at most: the verdicts, tokens and caches of `run_cycle`.

    Sampled requests without a seed have other noise, and the same distribution. `launch` returns at once and `wait` has
    what was decided; one cycle is under way at a time, and perhaps the beginning of the next (`launch_ahead`). The host
    writes one pinned buffer, int64 [11, Q], whose last rows are float64, and reads one, int64 [Q, 3 + K]; to copy them
    is part of the functions. A request keeps its column of the first from the beginning of a cycle to its end.
    """

    def __init__(
        self,
        target: GemmaTarget,
        caches: LayerCaches,
        proposer: Proposer | None,
        *,
        max_seats: int,
        context_length: int,
        rows_per_pass: int | None = None,
        default_draft_length: int = 0,
        acceptance: str = "rejection",
    ) -> None:
        """`proposer` is None or replayable (`is_replayable`); `rows_per_pass` is the only bucket of rows, if given."""
        self.acceptance = acceptance
        self.target, self.caches, self.proposer, self.rows_per_pass = target, caches, proposer, rows_per_pass
        self.max_seats, longest = max_seats, proposer.max_draft_length if proposer is not None else 0
        self.draft_buckets = sorted({default_draft_length, longest} - {0})
        self.graphs, device, is_cuda = Graphs(target.device), target.device, target.device.type == "cuda"
        self._sent = torch.tensor(SPARE_REQUEST)[:, None].repeat(1, max_seats)
        self._received = torch.zeros(max_seats, NUM_COUNTS + longest, dtype=torch.int64)
        if is_cuda:
            self._sent, self._received = self._sent.pin_memory(), self._received.pin_memory()
        self._sent_numbers, self._received_numbers = self._sent.numpy(), self._received.numpy()
        self._sent_fractions = self._sent[FRACTIONS].view(torch.float64).numpy()
        # Replays are unknown to the allocator of pinned memory: these copies tell it which stream has to be done before
        # the buffers may be given to another.
        self._requests = self._sent.to(device, copy=True, non_blocking=True)
        self._decided = self._received.to(device, copy=True, non_blocking=True)
        self._drafts = torch.zeros(max_seats, longest, dtype=torch.int64, device=device)
        shape = max_seats, longest, proposer.num_candidates if isinstance(proposer, ReplayableProposer) else 1
        self._candidate_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        wide = torch.promote_types(target.dtype, torch.float32)
        self._candidate_probs = torch.zeros(shape, dtype=wide, device=device)
        self._done = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self.last_position = context_length - 1
        self.runs_ahead = True
        """Whether `launch_ahead` does anything."""
        self._under_way: list[_Stand] = []
        self._lengths: Sequence[int] = ()
        self._begun: Beginning | None = None
        self._woken_s: float | None = None  # on the clock of `time.perf_counter`
        self.host_s: float | None = None
        """Seconds from the end of the last `wait` to the end of the `launch` after it; None until then."""
        self.launch_s = 0.0
        """Seconds that the last `launch` spent on the device's queue: the end of `host_s`."""

    def takes(self, requests: Sequence[RequestState], lengths: Sequence[int]) -> bool:
        """True where `launch` can run such a cycle: no request needs the host, and logits fit where any are kept."""
        if any(request.needs_host for request in requests):
            return False
        sampled = [request.params for request in requests if not request.params.is_greedy]
        if self.acceptance != "rejection" and any(params.seed is None for params in sampled):
            return False
        return not sampled or self._fits(self._num_rows(lengths))

    def _num_rows(self, lengths: Sequence[int]) -> int:
        return self.rows_per_pass or bucket_of(len(lengths) + sum(lengths))

    def _fits(self, num_rows: int) -> bool:
        return 4 * num_rows * self.target.config.vocab_size <= MAX_LOGITS_BYTES

    def launch(self, requests: Sequence[RequestState], lengths: Sequence[int]) -> None:
        """Run a cycle with so many drafts for each request, all of which it `takes`, or what is left of one begun.

        DrafterFault where the drafter fails; nothing of the cycle counts then.
        """
        is_sampled = any(not request.params.is_greedy for request in requests)
        beginning = self._beginning(len(requests), max(lengths), is_sampled=is_sampled)
        columns = self._begun_columns(requests, lengths) if beginning == self._begun else None
        has_begun, self._begun = columns is not None, None
        columns = list(range(len(requests))) if columns is None else columns
        self._write_table(requests, lengths, columns, is_sampled=is_sampled)
        started_s = perf_counter()
        self._run_load()
        if not has_begun:
            self._run_beginning(beginning)
        if beginning.draft_length:
            self._run_verify(self._num_rows(lengths), is_sampled=is_sampled)
        else:
            self._run_verify(beginning.num_rows, is_sampled=is_sampled, part=1)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self.target.device))
        ended_s, self._lengths = perf_counter(), tuple(lengths)
        self._under_way = [_Stand.of(*each) for each in zip(requests, columns, lengths, strict=True)]
        self.launch_s = ended_s - started_s
        self.host_s, self._woken_s = None if self._woken_s is None else ended_s - self._woken_s, None

    def launch_ahead(self) -> None:
        """Begin the cycle that follows the one under way, with all its requests; some may have ended by then.

        The device writes at most one position of each that the host does not know of yet. Nothing happens where the
        beginning has not been captured, or fails, or a seat has changed hands: `launch` will run all of it.
        """
        num_columns = 1 + max(stand.column for stand in self._under_way)
        is_sampled = any(not stand.request.params.is_greedy for stand in self._under_way)
        beginning = self._beginning(num_columns, max(self._lengths), is_sampled=is_sampled)
        is_ready = self.graphs.has(self._key(beginning)) and all(stand.holds_seat for stand in self._under_way)
        if not self.runs_ahead or not is_ready:
            return
        with suppress(DrafterFault):
            self._run_advance()
            self._run_beginning(beginning)
            self._begun = beginning

    def _beginning(self, num_requests: int, longest: int, *, is_sampled: bool) -> Beginning:
        if longest == 0:
            return Beginning(0, 0, self.rows_per_pass or bucket_of(num_requests), is_sampled)
        draft_length = next(bucket for bucket in self.draft_buckets if bucket >= longest)
        return Beginning(bucket_of(num_requests, most=self.max_seats), draft_length, 0, is_sampled)

    def _begun_columns(self, requests: Sequence[RequestState], lengths: Sequence[int]) -> list[int] | None:
        """Where the requests lie in what has begun; None if it is not this cycle's: others, or caches that changed."""
        if not all(stand.holds_seat for stand in self._under_way):
            return None
        stands = {stand.request.index: stand for stand in self._under_way}
        columns = []
        for request, length in zip(requests, lengths, strict=True):
            stand = stands.get(request.index)
            if stand is None or stand.next_position != request.anchor_position or length > stand.length:
                return None
            columns.append(stand.column)
        return columns

    def _write_table(
        self, requests: Sequence[RequestState], lengths: Sequence[int], columns: Sequence[int], *, is_sampled: bool
    ) -> None:
        table = self._sent_numbers
        table[:] = SPARE_COLUMN
        table[PLACES, columns] = [
            [request.seat for request in requests],
            [request.output_token_ids[-1] for request in requests],
            [request.anchor_position for request in requests],
            lengths,
            [request.planned_count for request in requests],
        ]
        if is_sampled:
            numbers = [sampling_numbers(request.params, request.noise_seed) for request in requests]
            table[WHOLE, columns] = list(zip(*(whole for whole, _ in numbers), strict=True))
            self._sent_fractions[:, columns] = list(zip(*(each for _, each in numbers), strict=True))

    def wait(self) -> Decided:
        """What the cycle that was launched last has decided, once it is done."""
        if self._done is not None:
            self._done.synchronize()
        self._woken_s, self.host_s = perf_counter(), None
        rows = self._received_numbers[[stand.column for stand in self._under_way]].tolist()
        for stand, row in zip(self._under_way, rows, strict=True):
            stand.next_position += row[0] + 1
        return Decided(
            num_accepted_tokens=[row[0] for row in rows],
            target_token_ids=[row[1] for row in rows],
            is_finite=[row[2] != 0 for row in rows],
            draft_token_ids=[row[NUM_COUNTS:] for row in rows],
            draft_lengths=self._lengths,
            logprobs=[()] * len(rows),
        )

    def warm_up(self, max_rows: int) -> None:
        """Capture what a running engine is likely to need, for up to so many rows, with no request in it.

        Of each form the largest comes first: what it leaves in the pool serves smaller ones, not the other way round.
        """
        self._sent_numbers[:] = SPARE_COLUMN
        self._run_advance()
        self._run_load()
        for is_sampled in (False, True):
            for num_requests in reversed(buckets_up_to(self.max_seats, most=self.max_seats)):
                for draft_length in self.draft_buckets[:1]:
                    self._run_beginning(Beginning(num_requests, draft_length, 0, is_sampled))
            for num_rows in [self.rows_per_pass] if self.rows_per_pass else reversed(buckets_up_to(max_rows)):
                if not is_sampled or self._fits(num_rows):
                    self._run_verify(num_rows, is_sampled=is_sampled)

    @staticmethod
    def _key(beginning: Beginning) -> Hashable:
        """Of the graph that it is, or is the first part of."""
        return beginning if beginning.draft_length else ("verify", beginning.num_rows, beginning.is_sampled)

    def _run_load(self) -> None:
        self.graphs.run("verify", "load", self._load)

    def _run_advance(self) -> None:
        self.graphs.run("draft" if self.draft_buckets else "verify", "advance", self._advance)

    def _run_beginning(self, beginning: Beginning) -> None:
        if beginning.draft_length:
            self.graphs.run("draft", self._key(beginning), partial(self._draft, beginning))
        else:
            self._run_verify(beginning.num_rows, is_sampled=beginning.is_sampled, part=0)

    def _run_verify(self, num_rows: int, *, is_sampled: bool, part: int | None = None) -> None:
        verify_rows = partial(self._verify, num_rows, is_sampled)
        self.graphs.run("verify", ("verify", num_rows, is_sampled), verify_rows, part=part)

    def _load(self, _begin_part: Callable[[], None]) -> None:
        """Where requests stand, as the host says."""
        self._requests.copy_(self._sent, non_blocking=True)

    def _advance(self, _begin_part: Callable[[], None]) -> None:
        """Where requests stand after the cycle just decided; those that end with it stay within bounds."""
        num_accepted, target_token_ids = self._decided[:, 0], self._decided[:, 1]
        self._requests[ANCHOR_ID] = target_token_ids.clamp(0, self.target.config.vocab_size - 1)
        self._requests[POSITION] = (self._requests[POSITION] + num_accepted + 1).clamp(0, self.last_position)

    def _draft(self, beginning: Beginning, _begin_part: Callable[[], None]) -> None:
        """So many drafts after the anchors of the first requests; a request's own length says how many count."""
        assert isinstance(self.proposer, ReplayableProposer)
        num_requests, draft_length, _, is_sampled = beginning
        sampling = self._sampling(num_requests) if is_sampled else None
        draft = self.proposer.propose_on_device(self._anchors(num_requests), draft_length, sampling)
        self._drafts[:num_requests, :draft_length] = draft.token_ids
        if is_sampled:
            self._candidate_ids[:num_requests, :draft_length] = draft.candidate_ids
            self._candidate_probs[:num_requests, :draft_length] = draft.candidate_probs

    def _verify(self, num_rows: int, is_sampled: bool, begin_part: Callable[[], None]) -> None:
        """All that follows the drafts, for all requests that there can be."""
        anchors, sampling = self._anchors(self.max_seats), self._sampling(self.max_seats)
        draft = DraftBlock(self._drafts, self._candidate_ids, self._candidate_probs)

        def judge(hidden: Tensor, packed: PackedRows) -> Judged:
            if is_sampled:
                return accept_sampled(anchors, sampling, draft, self.target, hidden, packed)
            return accept_best(anchors, self._drafts, self.target, hidden, packed.row_index)

        (num_accepted, target_token_ids), is_finite, _ = verify(
            anchors,
            self._drafts,
            judge,
            num_rows=num_rows,
            target=self.target,
            caches=self.caches,
            proposer=self.proposer,
            after_first_layers=begin_part,
        )
        counts = torch.stack([num_accepted, target_token_ids, is_finite.long()], dim=1)
        self._decided.copy_(torch.cat([counts, self._drafts], dim=1))
        self._received.copy_(self._decided, non_blocking=True)

    def _anchors(self, num_requests: int) -> Anchors:
        seats, token_ids, positions, lengths, planned = self._requests[PLACES, :num_requests].unbind(0)
        return Anchors(
            seats=seats,
            anchor_token_ids=token_ids,
            anchor_positions=positions,
            draft_lengths=lengths,
            planned_counts=planned,
        )

    def _sampling(self, num_requests: int) -> Sampling:
        fractions = self._requests[FRACTIONS].view(torch.float64)
        return sampling_of(self._requests[WHOLE, :num_requests], fractions[:, :num_requests])


def bucket_of(count: int, *, most: int | None = None) -> int:
    """The smallest of 1, 2, 4, … that is not less than `count`; `most` caps the last one."""
    bucket = 1
    while bucket < count:
        bucket *= 2
    return bucket if most is None else min(bucket, most)


def buckets_up_to(count: int, *, most: int | None = None) -> list[int]:
    """All buckets that counts of 1 to `count` fall into, ascending."""
    return sorted({bucket_of(each, most=most) for each in range(1, count + 1)})
