"""All slots of a block walked in one launch, a program a request; `walk.walk_stepwise` is the twin.

Vectors that are multiplied with matrices lie in memory: a program can load parts of them, but not cut parts out of what
it holds. They are rounded as the twin rounds them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.sampler import Sampling
from outrider.kernels.sampling import CHUNK, check_strides, draw_candidate
from outrider.kernels.walk import MarkovTensors, Walked, WalkStarts, WalkTensors

COLUMNS = 128  # of w2's rows that are multiplied at a time
JOINT_COLUMNS = 32  # of the joint layer, which is float32
NUM_WARPS = 8


@triton.jit
def _products(matrix, rows, are_rows, vector, stride, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a matrix, RANK numbers each, times a vector, both in memory: float32 [rows]."""
    sums = tl.zeros(rows.shape, tl.float32)
    for start in range(0, RANK, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < RANK
        part = tl.load(vector + columns, mask=inside, other=0.0).to(tl.float32)
        at = rows[:, None] * stride + columns[None, :]
        tile = tl.load(matrix + at, mask=are_rows[:, None] & inside[None, :], other=0.0).to(tl.float32)
        sums += tl.sum(tile * part[None, :], axis=1)
    return sums


@triton.jit
def _joined(joint, parts, rows, are_rows, state, embedded, stride, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Outputs `rows` of the joint layer, float32, of [embedded], or of [state; embedded]."""
    sums = tl.load(parts + rows, mask=are_rows, other=0.0)
    if state is not None:
        sums += _products(joint, rows, are_rows, state, stride, RANK, COLUMNS)
        joint += RANK
    return sums + _products(joint, rows, are_rows, embedded, stride, RANK, COLUMNS)


@triton.jit
def _tanh(values):
    return 2.0 * tl.sigmoid(2.0 * values) - 1.0


@triton.jit
def _write_latent(
    latent, state, embedded, joint, parts, stride, RANK: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """What a slot of a gated head gives to w2, or of one with a state, which moves on."""
    ranks = tl.arange(0, RANKS)
    inside = ranks < RANK
    known = tl.load(embedded + ranks, mask=inside, other=0.0)
    gate = tl.sigmoid(_joined(joint, parts, ranks, inside, state, embedded, stride, RANK, COLUMNS))
    if state is None:
        given = gate.to(known.dtype).to(tl.float32) * known.to(tl.float32)
        tl.debug_barrier()  # every lane has read what the last slot gave
    else:
        new = _joined(joint, parts, ranks + RANK, inside, state, embedded, stride, RANK, COLUMNS)
        given = _tanh(_joined(joint, parts, ranks + 2 * RANK, inside, state, embedded, stride, RANK, COLUMNS))
        old = tl.load(state + ranks, mask=inside, other=0.0).to(tl.float32)
        tl.debug_barrier()  # and the old state
        tl.store(state + ranks, (gate * old + (1.0 - gate) * _tanh(new)).to(known.dtype), mask=inside)
    tl.store(latent + ranks, given.to(known.dtype), mask=inside)
    tl.debug_barrier()


@triton.jit
def walk_kernel(
    logits, token_ids, seats, anchors, embeddings, w2, joint, joint_parts, joint_stride, vectors,
    confidence, confidence_parts, temperatures, top_ks, top_ps, min_ps, seeds, are_seeded, positions,
    drafts, probs, chances, num_slots, num_steps, size,
    RANK: tl.constexpr, RANKS: tl.constexpr, JOINT: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, JOINT_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The slots of a request that one program walks: all of them, or one where none needs the draft before it."""
    request, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * num_steps
    if tl.load(seats + request) < 0:
        return
    places, ranks = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    inside = places < size
    embedded, latent, state = anchors, vectors, None
    if w2 is not None:
        embedded += request * RANK
    if vectors is not None:
        latent += request * 2 * RANK
    if JOINT == 3 * RANK:
        state = latent + RANK
        tl.store(state + ranks, tl.zeros((RANKS,), vectors.dtype.element_ty), mask=ranks < RANK)
        tl.debug_barrier()
    for slot in range(first, first + num_steps):
        at = request * num_slots + slot
        scores = tl.load(logits + at * size + places, mask=inside, other=float("-inf"))
        if w2 is not None:
            given = embedded
            if latent is not None:
                parts, given = joint_parts + at * JOINT, latent
                _write_latent(latent, state, embedded, joint, parts, joint_stride, RANK, RANKS, JOINT_COLUMNS)
            scores += _products(w2 + at * size * RANK, places, inside, given, RANK, RANK, COLUMNS)
        if confidence_parts is not None:
            chance = tl.load(confidence_parts + at)
            if confidence is not None:
                weights = tl.load(confidence + ranks, mask=ranks < RANK, other=0.0)
                known = tl.load(embedded + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
                chance += tl.sum(weights * known, axis=0)
            tl.store(chances + at, tl.sigmoid(chance))
        if probs is None:
            place = tl.min(tl.where(scores == tl.max(scores, axis=0), places, size - 1), axis=0)
        else:
            tl.store(probs + at * size + places, scores, mask=inside)
            tl.debug_barrier()  # lanes read each other's scores
            place, shares = draw_candidate(
                probs + at * size, scores, token_ids + at * size, request,
                temperatures, top_ks, top_ps, min_ps, seeds, are_seeded, positions, slot, size, BLOCK, CHUNK,
            )  # fmt: skip
            tl.debug_barrier()
            tl.store(probs + at * size + places, shares, mask=inside)
        tl.store(drafts + at, tl.load(token_ids + at * size + place))
        if w2 is not None:
            embedded = embeddings + (at * size + place) * RANK


def walk_in_one(tensors: WalkTensors, starts: WalkStarts, sampling: Sampling | None) -> Walked:
    """`Kernels.walk` of float32 logits; a spare request gets zeros."""
    check_strides(*(sampling or ()), starts.seats, starts.positions)
    logits, token_ids, head = tensors.logits.contiguous(), tensors.token_ids.contiguous(), tensors.markov
    num_requests, num_slots, size = logits.shape
    rank, joint_size, joint_stride, vectors = 1 if head is None else head.w2.shape[3], 0, 0, None
    if head is not None and head.joint is not None:
        joint_size, joint_stride = len(head.joint), head.joint.stride(0)
        vectors = head.w2.new_empty(num_requests, 2, rank)
    drafts = token_ids.new_zeros(num_requests, num_slots)
    probs = None if sampling is None else torch.zeros_like(logits)
    chances = None if tensors.confidence_parts is None else torch.zeros_like(tensors.confidence_parts)
    num_steps = 1 if head is None else num_slots
    walk_kernel[num_requests, num_slots // num_steps](
        logits, token_ids, starts.seats, *(head or [None] * len(MarkovTensors._fields)), joint_stride, vectors,
        tensors.confidence, tensors.confidence_parts,
        *(sampling or [None] * len(Sampling._fields)), starts.positions,
        drafts, probs, chances, num_slots, num_steps, size,
        RANK=rank, RANKS=triton.next_power_of_2(rank), JOINT=joint_size,
        BLOCK=triton.next_power_of_2(size), CHUNK=CHUNK, COLUMNS=COLUMNS, JOINT_COLUMNS=JOINT_COLUMNS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return Walked(drafts, None if probs is None else token_ids, probs, chances)
