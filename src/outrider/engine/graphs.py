"""Cycles on a device: two functions of tensors, captured once a bucket, between which the host only launches.

Data decides no shape and no branch (design §4.1): requests, drafts and rows come in buckets, and what a bucket has too
many of is spare. On CUDA the functions are captured as graphs; elsewhere they run as they are, which is their twin.
Each function has two forms: where all requests are greedy, no logits are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import Anchors, PackedRows
from outrider.engine.cycle import Decided, Judged, accept_best, accept_sampled, verify
from outrider.engine.proposer import Proposer, ReplayableProposer
from outrider.engine.rejection import DraftBlock
from outrider.engine.sampling import sampling_numbers, sampling_of
from outrider.engine.state import RequestState
from outrider.kernels.sampler import Sampling
from outrider.models.attention import LayerCaches
from outrider.models.gemma import GemmaTarget

# Seat, anchor id, position, draft length, planned count; then whole numbers and fractions of `sampling_numbers`.
SPARE_REQUEST = (-1, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0)
SPARE_COLUMN = np.array(SPARE_REQUEST)[:, None]
PLACES, WHOLE, FRACTIONS = slice(0, 5), slice(5, 8), slice(8, 11)
MAX_LOGITS_BYTES = 256 << 20  # of a cycle with sampled requests, which are float32
NUM_COUNTS = 3  # of what comes back for a request before its drafts: accepted tokens, target's token, is finite


class Graphs:
    """Functions of tensors that stay where they are, captured by name and replayed; without CUDA they are called."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Launch function() on the current stream; the first time for a key takes long."""
        if self.device.type != "cuda":
            function()
            return
        if key not in self._graphs:
            self._graphs[key] = self._captured(function)
        self._graphs[key].replay()

    def _captured(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run once, so that kernels are compiled and faults are raised, then capture; running twice changes nothing."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: theirs is no part of the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph


class DeviceCycle:
    """Cycles of requests that ask for temperature and filters at most: the verdicts, tokens and caches of `run_cycle`.

    Sampled requests without a seed have other noise, and the same distribution. `launch` returns at once and `wait` has
    what was decided; one cycle is under way at a time. The host writes one pinned buffer, int64 [11, Q], whose last
    rows are float64, and reads one, int64 [Q, 3 + K]; to copy them is part of the functions.
    """

    def __init__(
        self,
        target: GemmaTarget,
        caches: LayerCaches,
        proposer: Proposer | None,
        *,
        max_seats: int,
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
        self._lengths: Sequence[int] = ()
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
        """Begin a cycle with so many drafts for each request, all of which it `takes`.

        DrafterFault where the drafter fails; nothing of the cycle counts then.
        """
        num_requests, longest = len(requests), max(lengths)
        is_sampled = any(not request.params.is_greedy for request in requests)
        self._write_table(requests, lengths, is_sampled=is_sampled)
        started_s = perf_counter()
        if longest > 0:
            draft_length = next(bucket for bucket in self.draft_buckets if bucket >= longest)
            self._run_draft(bucket_of(num_requests, most=self.max_seats), draft_length, is_sampled=is_sampled)
        self._run_verify(self._num_rows(lengths), is_sampled=is_sampled)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self.target.device))
        ended_s, self._lengths = perf_counter(), tuple(lengths)
        self.launch_s = ended_s - started_s
        self.host_s, self._woken_s = None if self._woken_s is None else ended_s - self._woken_s, None

    def _write_table(self, requests: Sequence[RequestState], lengths: Sequence[int], *, is_sampled: bool) -> None:
        table, num_requests = self._sent_numbers, len(requests)
        table[PLACES, :num_requests] = [
            [request.seat for request in requests],
            [request.output_token_ids[-1] for request in requests],
            [request.anchor_position for request in requests],
            lengths,
            [request.planned_count for request in requests],
        ]
        if is_sampled:
            numbers = [sampling_numbers(request.params, request.noise_seed) for request in requests]
            table[WHOLE, :num_requests] = list(zip(*(whole for whole, _ in numbers), strict=True))
            self._sent_fractions[:, :num_requests] = list(zip(*(each for _, each in numbers), strict=True))
        table[:, num_requests:] = SPARE_COLUMN

    def wait(self) -> Decided:
        """What the cycle that was launched last has decided, once it is done."""
        if self._done is not None:
            self._done.synchronize()
        self._woken_s, self.host_s = perf_counter(), None
        rows = self._received_numbers[: len(self._lengths)].tolist()
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
        for is_sampled in (False, True):
            for num_requests in reversed(buckets_up_to(self.max_seats, most=self.max_seats)):
                for draft_length in self.draft_buckets[:1]:
                    self._run_draft(num_requests, draft_length, is_sampled=is_sampled)
            for num_rows in [self.rows_per_pass] if self.rows_per_pass else reversed(buckets_up_to(max_rows)):
                if not is_sampled or self._fits(num_rows):
                    self._run_verify(num_rows, is_sampled=is_sampled)

    def _run_draft(self, num_requests: int, draft_length: int, *, is_sampled: bool) -> None:
        key = ("draft", num_requests, draft_length, is_sampled)
        self.graphs.run(key, partial(self._draft, num_requests, draft_length, is_sampled=is_sampled))

    def _run_verify(self, num_rows: int, *, is_sampled: bool) -> None:
        self.graphs.run(("verify", num_rows, is_sampled), partial(self._verify, num_rows, is_sampled=is_sampled))

    def _draft(self, num_requests: int, draft_length: int, *, is_sampled: bool) -> None:
        """So many drafts after the anchors of the first requests; a request's own length says how many count."""
        assert isinstance(self.proposer, ReplayableProposer)
        self._requests.copy_(self._sent, non_blocking=True)
        sampling = self._sampling(num_requests) if is_sampled else None
        draft = self.proposer.propose_on_device(self._anchors(num_requests), draft_length, sampling)
        self._drafts[:num_requests, :draft_length] = draft.token_ids
        if is_sampled:
            self._candidate_ids[:num_requests, :draft_length] = draft.candidate_ids
            self._candidate_probs[:num_requests, :draft_length] = draft.candidate_probs

    def _verify(self, num_rows: int, *, is_sampled: bool) -> None:
        """All that follows the drafts, for all requests that there can be."""
        self._requests.copy_(self._sent, non_blocking=True)
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
