"""Sampled rows in Triton: thresholds by selection, Gumbel's maximum, rejection along a block; `sampler.py` is the twin.

A row of a large vocabulary is cut into splits of fixed places, a program each. Thresholds are found on the bit patterns
of logits, which order as the numbers do: each pass looks at WAYS bounds at once and keeps the range between two of
them, counting tokens for top-k and adding up chances for top-p. Chances are added as whole numbers, so that no order of
summation, no split and no neighbour changes a bit. Nothing is read back; every launch is fit for a CUDA graph.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.noise import NoisePurpose
from outrider.kernels.sampler import Drafted, RowFilters, Sampling, lowest_by_chance

SPLIT = 4096  # logits a program looks at
TILE = 1024  # of them at a time
WAYS = 8  # bounds a pass looks at; NUM_PASSES of them tell 2^32 patterns apart
NUM_PASSES = 11
LOWEST_KEY = -0x7F800001  # of -inf
UNIT = tl.constexpr(2.0**42)  # of a chance in whole numbers; 2^20 tokens' add up below 2^63
CHUNK = 32  # candidates that all others are compared with at a time
DRAFT, ACCEPT, TARGET, MATCH = (
    tl.constexpr(int(purpose))
    for purpose in (NoisePurpose.DRAFT, NoisePurpose.ACCEPT, NoisePurpose.TARGET, NoisePurpose.MATCH)
)


@triton.jit
def _keys(values):
    """int32 that order as float32 do; the zeros' differ, which no threshold shows: as numbers they are equal."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _uniforms(seed, counters, position, purpose, slot, ARE_IDS: tl.constexpr):
    """Numbers in (0, 1), float64, of int32 counters: the first word of each; or of ids, four of which share a block."""
    blocks = counters // 4 if ARE_IDS else counters
    zeros = blocks * 0
    at, use, place = zeros + position.to(tl.int32), zeros + purpose, zeros + slot
    word_0, word_1, word_2, word_3 = tl.philox(seed, blocks, at, use, place)
    if ARE_IDS:
        lane = counters % 4
        word_0 = tl.where(lane == 1, word_1, word_0)
        word_0 = tl.where(lane == 2, word_2, word_0)
        word_0 = tl.where(lane == 3, word_3, word_0)
    return (word_0.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def _gumbel(seed, token_ids, position, purpose, slot):
    """float64 noise of int32 token ids."""
    return -tl.log(-tl.log(_uniforms(seed, token_ids, position, purpose, slot, True)))


@triton.jit
def _weights(values, largest, temperature):
    """exp((logit - largest) / temperature) in float32."""
    return tl.exp((values - largest) * (1.0 / temperature).to(tl.float32))


@triton.jit
def probe_kernel(
    logits, temperatures, largest, low, high, partials, size,
    BY_CHANCE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """How many tokens of a split, or how much chance, are at or above each of WAYS keys of a row's range."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = tl.load(low + row), tl.load(high + row)
    if last - first > 1:
        ways = tl.arange(0, WAYS)
        bounds = (first + (last - first) * ways // WAYS).to(tl.int32)
        top, temperature = tl.load(largest + row), tl.load(temperatures + row)
        sums = tl.zeros((WAYS,), tl.int64)
        for start in range(0, SPLIT, TILE):
            columns = split * SPLIT + start + tl.arange(0, TILE)
            inside = columns < size
            values = tl.load(logits + row * size + columns, mask=inside, other=float("-inf"))
            parts = (_weights(values, top, temperature) * UNIT).to(tl.int64) if BY_CHANCE else inside.to(tl.int64)
            is_above = _keys(values)[:, None] >= bounds[None, :]
            sums += tl.sum(tl.where(is_above, parts[:, None], 0), axis=0)
        tl.store(partials + (row * tl.num_programs(1) + split) * WAYS + ways, sums)


@triton.jit
def narrow_kernel(
    partials, top_ks, top_ps, goals, low, high, num_splits,
    BY_CHANCE: tl.constexpr, IS_FIRST: tl.constexpr, SPLITS: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Keep the part of a row's range whose lower end still reaches top_k, or top_p of all there is, and no upper."""
    row = tl.program_id(0).to(tl.int64)
    first, last = tl.load(low + row), tl.load(high + row)
    if last - first > 1:
        splits, ways = tl.arange(0, SPLITS), tl.arange(0, WAYS)
        at = (row * num_splits + splits[:, None]) * WAYS + ways[None, :]
        sums = tl.sum(tl.load(partials + at, mask=(splits < num_splits)[:, None], other=0), axis=0)
        if not BY_CHANCE:
            goal = tl.load(top_ks + row).to(tl.float64)
        elif IS_FIRST:
            everything = tl.max(sums, axis=0)  # the lowest bound is below all that an earlier filter left
            goal = tl.load(top_ps + row) * everything.to(tl.float64)
            tl.store(goals + row, goal)
        else:
            goal = tl.load(goals + row)
        way = tl.maximum(tl.sum((sums.to(tl.float64) >= goal).to(tl.int32), axis=0) - 1, 0)
        spread = last - first
        tl.store(low + row, first + spread * way // WAYS)
        tl.store(high + row, first + spread * (way + 1) // WAYS)


@triton.jit
def total_kernel(logits, temperatures, thresholds, largest, partials, size, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """The chance that is left of a split, in whole numbers; 0 for greedy rows."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, threshold, top = tl.load(temperatures + row), tl.load(thresholds + row), tl.load(largest + row)
    total = tl.zeros((), tl.int64)
    if temperature > 0.0:
        for start in range(0, SPLIT, TILE):
            columns = split * SPLIT + start + tl.arange(0, TILE)
            values = tl.load(logits + row * size + columns, mask=columns < size, other=float("-inf"))
            parts = (_weights(values, top, temperature) * UNIT).to(tl.int64)
            total += tl.sum(tl.where(values >= threshold, parts, 0), axis=0)
    tl.store(partials + row * tl.num_programs(1) + split, total)


@triton.jit
def best_of_split_kernel(
    logits, rows, temperatures, are_seeded, thresholds, largest, seeds, positions, best_scores, best_ids, size,
    IS_REJECTING: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best of a split of row `rows[i]`, by logit or with noise added, and its id; for one kind of requests only."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, is_seeded = tl.load(temperatures + index), tl.load(are_seeded + index)
    is_wanted = (temperature > 0.0) & (is_seeded == 0) if IS_REJECTING else (temperature <= 0.0) | (is_seeded != 0)
    if is_wanted:
        row = tl.load(rows + index)
        threshold, top = tl.load(thresholds + row), tl.load(largest + row).to(tl.float64)
        seed, position = tl.load(seeds + index), tl.load(positions + index)
        best, chosen = tl.full((), float("-inf"), tl.float64), split * SPLIT
        for start in range(0, SPLIT, TILE):
            columns = split * SPLIT + start + tl.arange(0, TILE)
            inside = columns < size
            values = tl.load(logits + row * size + columns, mask=inside, other=float("-inf"))
            scores = values.to(tl.float64)
            is_kept = inside
            if temperature > 0.0:
                is_kept = inside & (values >= threshold)
                if tl.sum(is_kept.to(tl.int32), axis=0) > 0:
                    purpose = TARGET if IS_REJECTING else MATCH
                    noise = _gumbel(seed, columns, position, purpose, 0)
                    scores = (scores - top) * (1.0 / temperature) + noise
            scores = tl.where(is_kept, scores, float("-inf"))
            found = tl.max(scores, axis=0)
            place = tl.min(tl.where(scores == found, columns, size - 1), axis=0)
            chosen = tl.where(found > best, place, chosen)
            best = tl.maximum(found, best)
        tl.store(best_scores + index * tl.num_programs(1) + split, best)
        tl.store(best_ids + index * tl.num_programs(1) + split, tl.minimum(chosen, size - 1))


@triton.jit
def _best_of_splits(best_scores, best_ids, index, num_splits, SPLITS: tl.constexpr):
    """Score and id; ties go to the lower id."""
    splits = tl.arange(0, SPLITS)
    at, inside = index * num_splits + splits, splits < num_splits
    scores = tl.load(best_scores + at, mask=inside, other=float("-inf"))
    ids = tl.load(best_ids + at, mask=inside, other=0x7FFFFFFF)
    score = tl.max(scores, axis=0)
    chosen = tl.min(tl.where(scores == score, ids, 0x7FFFFFFF), axis=0)
    return score, tl.where(chosen == 0x7FFFFFFF, 0, chosen)


@triton.jit
def chosen_kernel(best_scores, best_ids, temperatures, are_seeded, chosen_ids, num_splits, SPLITS: tl.constexpr):
    """The best of a row's splits; 0 for rows judged by rejection."""
    row = tl.program_id(0).to(tl.int64)
    chosen = tl.zeros((), tl.int32)
    if (tl.load(temperatures + row) <= 0.0) | (tl.load(are_seeded + row) != 0):
        _, chosen = _best_of_splits(best_scores, best_ids, row, num_splits, SPLITS)
    tl.store(chosen_ids + row, chosen.to(tl.int64))


@triton.jit
def _chances(logits, row, token_ids, mask, thresholds, largest, totals, temperature, size):
    """Chances of some tokens of a row, or of a row each, float64."""
    values = tl.load(logits + row * size + token_ids, mask=mask, other=float("-inf"))
    top, total = tl.load(largest + row, mask=mask, other=0.0), tl.load(totals + row, mask=mask, other=1.0)
    is_kept = mask & (values >= tl.load(thresholds + row, mask=mask, other=0.0))
    return tl.where(is_kept, _weights(values, top, temperature).to(tl.float64) / total, 0.0)


@triton.jit
def accept_kernel(
    logits, temperatures, are_seeded, seeds, thresholds, largest, totals,
    token_ids, candidate_ids, candidate_probs, chances, lengths, positions, row_index,
    accepted_counts, last_rows, left, whole, size, num_drafts, num_candidates,
    DRAFTS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """How many drafts of a request are kept, and what is left of the row after them at the candidates of the next.

    Those candidates are ruled out in the row itself: the rest of it is then the rest of what is left over.
    """
    request = tl.program_id(0).to(tl.int64)
    temperature, is_seeded = tl.load(temperatures + request), tl.load(are_seeded + request)
    row = tl.load(row_index + request * (num_drafts + 1))
    num_accepted = tl.zeros((), tl.int32)
    if (temperature > 0.0) & (is_seeded == 0):
        slots = tl.arange(0, DRAFTS)
        length = tl.load(lengths + request)
        inside = slots < tl.minimum(length, num_drafts)
        at = request * num_drafts + slots
        rows = tl.load(row_index + request * (num_drafts + 1) + slots, mask=inside, other=0)
        drafts = tl.load(token_ids + at, mask=inside, other=0)
        wanted = _chances(logits, rows, drafts, inside, thresholds, largest, totals, temperature, size)
        seed, position = tl.load(seeds + request), tl.load(positions + request)
        uniform = _uniforms(seed, slots, position, ACCEPT, 0, False)
        drafted = tl.load(chances + at, mask=inside, other=1.0).to(tl.float64)
        is_kept = inside & (uniform * drafted < wanted)
        num_accepted = tl.min(tl.where(is_kept, DRAFTS, slots), axis=0)
        row = tl.load(row_index + request * (num_drafts + 1) + num_accepted)
        candidates = tl.arange(0, CANDIDATES)
        is_candidate = candidates < tl.where(num_accepted < length, num_candidates, 0)
        at = (request * num_drafts + num_accepted) * num_candidates + candidates
        ids = tl.load(candidate_ids + at, mask=is_candidate, other=0)
        taken = tl.load(candidate_probs + at, mask=is_candidate, other=0.0).to(tl.float64)
        same_row = row + tl.zeros((CANDIDATES,), tl.int64)
        chance = _chances(logits, same_row, ids, is_candidate, thresholds, largest, totals, temperature, size)
        tl.debug_barrier()  # every lane has read the row before any of it is ruled out
        tl.store(logits + row * size + ids, float("-inf"), mask=is_candidate)
        at = request * num_candidates + candidates
        tl.store(left + at, tl.maximum(chance - taken, 0.0), mask=candidates < num_candidates)
        tl.store(whole + at, chance, mask=candidates < num_candidates)
    tl.store(accepted_counts + request, num_accepted.to(tl.int64))
    tl.store(last_rows + request, row)


@triton.jit
def settle_kernel(
    best_scores, best_ids, temperatures, are_seeded, seeds, totals, positions,
    candidate_ids, accepted_counts, last_rows, left, whole, chosen_ids,
    num_splits, num_drafts, num_candidates, SPLITS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The target's token of a request: the best of its row without candidates, and of what is left at candidates.

    Where nothing is left anywhere, draft and target are equal, and the target lies within the candidates.
    """
    request = tl.program_id(0).to(tl.int64)
    chosen = tl.zeros((), tl.int64)
    if (tl.load(temperatures + request) > 0.0) & (tl.load(are_seeded + request) == 0):
        score, outside = _best_of_splits(best_scores, best_ids, request, num_splits, SPLITS)
        score -= tl.log(tl.load(totals + tl.load(last_rows + request)))
        num_accepted = tl.load(accepted_counts + request)
        candidates = tl.arange(0, CANDIDATES)
        inside = candidates < tl.where(num_accepted < num_drafts, num_candidates, 0)
        at = request * num_candidates + candidates
        ids = tl.load(candidate_ids + (request * num_drafts + num_accepted) * num_candidates + candidates, inside, 0)
        chances = tl.load(left + at, mask=inside, other=0.0)
        if (score == float("-inf")) & (tl.max(chances, axis=0) == 0.0):
            chances = tl.load(whole + at, mask=inside, other=0.0)
        seed, position = tl.load(seeds + request), tl.load(positions + request)
        noise = _gumbel(seed, ids.to(tl.int32), position, TARGET, 0)
        scores = tl.where(chances > 0.0, tl.log(chances) + noise, float("-inf"))
        found = tl.max(scores, axis=0)
        place = tl.min(tl.where((scores == found) & inside, candidates, CANDIDATES - 1), axis=0)
        within = tl.sum(tl.where(candidates == place, ids, 0), axis=0)
        chosen = tl.where(found > score, within, outside.to(tl.int64))
    tl.store(chosen_ids + request, chosen)


@triton.jit
def draw_candidate(
    row, values, token_ids, request, temperatures, top_ks, top_ps, min_ps, seeds, are_seeded, positions, slot, size,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Place of a request's draft among its candidates, each compared with all others, and their chances [BLOCK].

    `values` [BLOCK] are what `row` has in memory for the lanes to compare: no program can cut parts out of a register.
    """
    at = tl.arange(0, BLOCK)
    inside = at < size
    temperature, top = tl.load(temperatures + request), tl.max(values, axis=0)
    if temperature <= 0.0:
        place = tl.min(tl.where(values == top, at, size - 1), axis=0)
        chances = tl.where(at == place, 1.0, 0.0)
    else:
        num_above, chance_above = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, BLOCK, CHUNK):
            others = start + tl.arange(0, CHUNK)
            compared = tl.load(row + others, mask=others < size, other=float("-inf"))
            is_above = compared[None, :] > values[:, None]
            num_above += tl.sum(is_above.to(tl.int32), axis=1)
            parts = _weights(compared, top, temperature)
            chance_above += tl.sum(tl.where(is_above, parts[None, :], 0.0), axis=1)
        top_k, top_p = tl.load(top_ks + request), tl.load(top_ps + request)
        weights = _weights(values, top, temperature)
        is_kept = inside & (num_above < tl.where(top_k == 0, size, top_k))
        total = tl.sum(tl.where(is_kept, weights, 0.0), axis=0)
        goal = tl.where(top_p >= 1.0, float("inf"), top_p * total)
        is_kept = is_kept & (chance_above.to(tl.float64) < goal)
        lowest = (top.to(tl.float64) + temperature * tl.log(tl.load(min_ps + request))).to(tl.float32)
        weights = tl.where(is_kept & (values >= lowest), weights, 0.0)
        chances = weights / tl.sum(weights, axis=0)
        is_seeded = tl.load(are_seeded + request) != 0
        position = tl.load(positions + request) + tl.where(is_seeded, 1 + slot, 0)
        purpose, part = tl.where(is_seeded, MATCH, DRAFT), tl.where(is_seeded, 0, slot)
        ids = tl.load(token_ids + at, mask=inside, other=0).to(tl.int32)
        noise = _gumbel(tl.load(seeds + request), ids, position, purpose, part)
        scores = tl.where(chances > 0.0, tl.log(chances.to(tl.float64)) + noise, float("-inf"))
        place = tl.min(tl.where(scores == tl.max(scores, axis=0), at, size - 1), axis=0)
    return place, chances


@triton.jit
def draw_kernel(
    token_ids, logits, temperatures, top_ks, top_ps, min_ps, seeds, are_seeded, positions,
    drafts, probs, slot, id_stride, logit_stride, size, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A draft from the candidates of a request, and the distribution behind it."""
    request = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    row, ids = logits + request * logit_stride, token_ids + request * id_stride
    values = tl.load(row + at, mask=at < size, other=float("-inf"))
    place, chances = draw_candidate(
        row, values, ids, request,
        temperatures, top_ks, top_ps, min_ps, seeds, are_seeded, positions, slot, size, BLOCK, CHUNK,
    )  # fmt: skip
    tl.store(drafts + request, tl.load(ids + place))
    tl.store(probs + request * size + at, chances, mask=at < size)


class GpuSampler:
    """The `Sampler` protocol in Triton, for float32 logits."""

    def filters(self, logits: Tensor, sampling: Sampling) -> RowFilters:
        """Two searches over the bit patterns, by rank and by chance, then the sum of what is left."""
        check_strides(*sampling)
        (num_rows, size), num_splits = logits.shape, triton.cdiv(logits.shape[1], SPLIT)
        assert logits.dtype == torch.float32 and logits.is_contiguous(), (logits.dtype, logits.stride())  # noqa: PT018
        largest, is_sampled = logits.amax(dim=-1), sampling.temperatures > 0
        ends = _keys_of(largest) + 1
        low = torch.full_like(ends, LOWEST_KEY)
        is_cut = is_sampled & (sampling.top_ks > 0) & (sampling.top_ks < size)
        high = torch.where(is_cut, ends, low + 1)
        _search(logits, sampling, largest, low, high, by_chance=False)
        high = torch.where(is_sampled & (sampling.top_ps < 1.0), ends, low + 1)
        _search(logits, sampling, largest, low, high, by_chance=True)
        thresholds = torch.maximum(_values_of(low), lowest_by_chance(largest, sampling))
        partials = torch.empty(num_rows, num_splits, dtype=torch.int64, device=logits.device)
        arguments = logits, sampling.temperatures, thresholds, largest, partials, size
        total_kernel[num_rows, num_splits](*arguments, SPLIT=SPLIT, TILE=TILE)
        return RowFilters(thresholds, largest, partials.sum(dim=1).double() / UNIT.value)

    def choose(self, logits: Tensor, sampling: Sampling, filters: RowFilters, positions: Tensor) -> Tensor:
        """The best of every split, then of every row."""
        check_strides(*sampling, *filters, positions)
        rows = torch.arange(len(logits), device=logits.device)
        scores, ids = _best(logits, rows, sampling, filters, positions, is_rejecting=False)
        chosen, num_splits = torch.empty_like(rows), scores.shape[1]
        chosen_kernel[(len(rows),)](
            scores, ids, sampling.temperatures, sampling.are_seeded, chosen, num_splits,
            SPLITS=triton.next_power_of_2(num_splits),
        )  # fmt: skip
        return chosen

    def reject(
        self, logits: Tensor, sampling: Sampling, filters: RowFilters, drafted: Drafted
    ) -> tuple[Tensor, Tensor]:
        """The verdict of each request in one program; then its row without the candidates, and the candidates."""
        check_strides(*sampling, *filters, drafted.lengths, drafted.positions)
        num_requests, num_drafts, num_candidates = drafted.candidate_ids.shape
        requests = sampling.temperatures, sampling.are_seeded, sampling.seeds
        accepted, last_rows, chosen = (torch.empty_like(drafted.lengths) for _ in range(3))
        left = torch.empty(2, num_requests, max(num_candidates, 1), dtype=torch.float64, device=logits.device)
        blocks = {"CANDIDATES": triton.next_power_of_2(max(num_candidates, 1))}
        token_ids, candidate_ids = drafted.token_ids.contiguous(), drafted.candidate_ids.contiguous()
        accept_kernel[(num_requests,)](
            logits, *requests, filters.thresholds, filters.largest, filters.totals,
            token_ids, candidate_ids, drafted.candidate_probs.contiguous(), drafted.chances.contiguous(),
            drafted.lengths, drafted.positions, drafted.row_index.contiguous(),
            accepted, last_rows, left[0], left[1], logits.shape[1], num_drafts, num_candidates,
            DRAFTS=triton.next_power_of_2(max(num_drafts, 1)), **blocks,
        )  # fmt: skip
        scores, ids = _best(logits, last_rows, sampling, filters, drafted.positions, is_rejecting=True)
        settle_kernel[(num_requests,)](
            scores, ids, *requests, filters.totals, drafted.positions,
            candidate_ids, accepted, last_rows, left[0], left[1], chosen,
            scores.shape[1], num_drafts, num_candidates, SPLITS=triton.next_power_of_2(scores.shape[1]), **blocks,
        )  # fmt: skip
        return accepted, chosen

    def draw(
        self, token_ids: Tensor, logits: Tensor, sampling: Sampling, positions: Tensor, slot: int
    ) -> tuple[Tensor, Tensor]:
        """A program a request."""
        check_strides(*sampling, positions)
        num_requests, size = logits.shape
        assert token_ids.stride(1) == logits.stride(1) == 1, (token_ids.stride(), logits.stride())
        drafts, probs = token_ids.new_empty(num_requests), logits.new_empty(num_requests, size)
        draw_kernel[(num_requests,)](
            token_ids, logits, *sampling, positions, drafts, probs,
            slot, token_ids.stride(0), logits.stride(0), size, BLOCK=triton.next_power_of_2(size), CHUNK=CHUNK,
        )  # fmt: skip
        return drafts, probs


def check_strides(*fields: Tensor) -> None:
    """Kernels read numbers that lie side by side."""
    assert all(field.stride() == (1,) or len(field) < 2 for field in fields), "fields of many strides"


def _keys_of(values: Tensor) -> Tensor:
    """`_keys` of float32 [R], int64."""
    bits = values.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _values_of(keys: Tensor) -> Tensor:
    """The float32 that have these keys, int64 [R]."""
    bits = keys.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _search(logits: Tensor, sampling: Sampling, largest: Tensor, low: Tensor, high: Tensor, *, by_chance: bool) -> None:
    """Narrow low ≤ key < high, int64 [R] each, to the highest key at which enough is at or above."""
    num_rows, size = logits.shape
    num_splits = triton.cdiv(size, SPLIT)
    partials = torch.empty(num_rows, num_splits, WAYS, dtype=torch.int64, device=logits.device)
    goals = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    for step in range(NUM_PASSES):
        probe_kernel[num_rows, num_splits](
            logits, sampling.temperatures, largest, low, high, partials, size,
            BY_CHANCE=by_chance, SPLIT=SPLIT, TILE=TILE, WAYS=WAYS, num_warps=8,
        )  # fmt: skip
        narrow_kernel[(num_rows,)](
            partials, sampling.top_ks, sampling.top_ps, goals, low, high, num_splits,
            BY_CHANCE=by_chance, IS_FIRST=step == 0, SPLITS=triton.next_power_of_2(num_splits), WAYS=WAYS,
        )  # fmt: skip


def _best(
    logits: Tensor, rows: Tensor, sampling: Sampling, filters: RowFilters, positions: Tensor, *, is_rejecting: bool
) -> tuple[Tensor, Tensor]:
    """Best score float64 [Q, splits] of rows int64 [Q], and its id int32, of one kind of requests."""
    num_splits = triton.cdiv(logits.shape[1], SPLIT)
    scores = torch.empty(len(rows), num_splits, dtype=torch.float64, device=logits.device)
    ids = torch.empty(len(rows), num_splits, dtype=torch.int32, device=logits.device)
    best_of_split_kernel[len(rows), num_splits](
        logits, rows, sampling.temperatures, sampling.are_seeded, filters.thresholds, filters.largest,
        sampling.seeds, positions, scores, ids, logits.shape[1],
        IS_REJECTING=is_rejecting, SPLIT=SPLIT, TILE=TILE,
    )  # fmt: skip
    return scores, ids
