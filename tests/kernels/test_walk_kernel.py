"""The walk in one launch joined to the walk slot by slot, on heads of every kind.

Seen red: the anchor before every slot, ties to the later candidate, spare requests walked, the noise of slot 0 in every
slot, scores left where chances belong, a state that stands still or does not begin at 0, a chance by what goes to w2,
the joint layer's columns swapped, its bias or its slot forgotten, rows of w1 and w2 by each other's ids.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.kernels import walk_kernel
from outrider.kernels.gpu import GpuKernels
from outrider.kernels.low_bit import LowBitMatrix
from outrider.kernels.walk import Walked, WalkStarts
from outrider.models.drafter_config import MarkovKind
from outrider.models.dspark import BlockWalk, ConfidenceHead, DenseLayer, MarkovHead
from tests.kernels.sampled_rows import PARAMS, sampling
from tests.kernels.triton_mode import DEVICE, DTYPE, IS_NATIVE, TWIN, ids, normal

pytestmark = pytest.mark.filterwarnings("ignore")
OURS = GpuKernels(DTYPE, DEVICE)
MAX_ERROR = 2e-3 if IS_NATIVE else 1e-5  # of a chance; a bfloat16 latent may be rounded the other way
KINDS = [None, *MarkovKind]
JOINT_SHAPES = {MarkovKind.VANILLA: (0, 0), MarkovKind.GATED: (1, 1), MarkovKind.RNN: (3, 2)}  # [out, in] of ranks
SIZES = {"vocab_size": 96, "rank": 6, "size": 10, "num_candidates": 20, "num_slots": 3, "num_requests": 3}
FULL = {"vocab_size": 262_144, "rank": 256, "size": 3840, "num_candidates": 256, "num_slots": 15, "num_requests": 4}
SAMPLED = [PARAMS[index] for index in (1, 0, 4, 10)]
SOME = [PARAMS[index] for index in (0, 3, 4)]  # greedy, unseeded, seeded


def whole(*shape: int, seed: int, largest: int = 2) -> Tensor:
    """Small whole numbers, whose sums no order of summation changes: scores tie, and ties are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).to(DEVICE, DTYPE)


def rough(*shape: int, seed: int) -> Tensor:
    """Gaussian."""
    return normal(*shape, seed=seed)


class Made:
    """A drafter's heads on noise, and walks over one block of it."""

    def __init__(
        self,
        kind: MarkovKind | None,
        *,
        draft_vocab_size: int | None = None,
        by_draft_id: bool = False,
        numbers: Any = rough,
        confidence: str | None = "markov",
        vocab_size: int,
        rank: int,
        size: int,
        num_candidates: int,
        num_slots: int,
        num_requests: int,
    ) -> None:
        num_drafted = draft_vocab_size or vocab_size
        self.table = None if draft_vocab_size is None else torch.arange(num_drafted, device=DEVICE) * 2
        rows_by_draft_id = None
        if by_draft_id:
            rows_by_draft_id = torch.full((vocab_size,), num_drafted, device=DEVICE)
            rows_by_draft_id[self.table] = torch.arange(num_drafted, device=DEVICE)
        self.markov = None
        if kind is not None:
            w1 = numbers(num_drafted + 1 if by_draft_id else vocab_size, rank, seed=1)
            w2 = numbers(num_drafted, rank, seed=2) * (1 if numbers is whole else 3 * rank**-0.5)
            outs, ins = JOINT_SHAPES[kind]
            outs, ins = outs * rank, ins * rank + size
            joint = DenseLayer(rough(outs, ins, seed=3).float() * ins**-0.5, rough(outs, seed=4).float())
            self.markov = MarkovHead(kind, TWIN, w1, w2, joint if outs else None, rows_by_draft_id)
        reads_markov = confidence == "markov" and kind is not None
        proj = DenseLayer(rough(1, size + rank * reads_markov, seed=5).float() * size**-0.5, rough(1, seed=6).float())
        self.confidence = ConfidenceHead(reads_markov, proj) if confidence else None
        self.anchors = (torch.arange(num_requests, device=DEVICE) * 6 + 5) % vocab_size  # odd: no table has them
        self.positions, self.vocab_size = torch.arange(num_requests, device=DEVICE) * 9, vocab_size
        self._walk = BlockWalk(
            rough(num_requests, num_slots, size, seed=7),
            numbers(num_requests, num_slots, num_drafted, seed=8).float() * 2,
            num_candidates=num_candidates,
            draft_to_target=self.table,
            markov=self.markov,
            confidence=self.confidence,
        )

    def walk(self) -> BlockWalk:
        """From the start, over the same candidates in the same order each time, ties as well."""
        walk = copy.copy(self._walk)
        walk.markov = self.markov
        return walk

    def walked(self, kernels: Any, params: list[SamplingParams] | None = None, seats: Tensor | None = None) -> Walked:
        asked = None if params is None else sampling(params, DEVICE)
        seats = torch.arange(len(self.anchors), device=DEVICE) if seats is None else seats
        return kernels.walk(self.walk(), WalkStarts(self.anchors, seats, self.positions), asked)


def by_id(token_ids: Tensor, probs: Tensor, vocab_size: int) -> Tensor:
    """Draft distributions [Q, C] in the order of ids, [Q, V]."""
    return probs.new_zeros(len(probs), vocab_size).scatter(1, token_ids, probs)


def check_steps(made: Made, ours: Walked, params: list[SamplingParams] | None) -> None:
    """Every slot against the twin's after the same drafts: what one rounding changes is not passed on."""
    walk, previous = made.walk(), made.anchors
    for slot, drafts in enumerate(ours.token_ids.unbind(1)):
        candidates = walk.step(previous)
        if params is None:
            lost = candidates.logits[:, 0] - candidates.logits[candidates.ids == drafts[:, None]]
            assert lost.max() <= 10 * MAX_ERROR
        else:
            _, probs = TWIN.sampler.draw(*candidates[:2], sampling(params, DEVICE), made.positions, slot)
            exact = by_id(candidates.ids, probs, made.vocab_size)
            assert ours.candidate_ids is not None
            assert ours.candidate_probs is not None
            found = by_id(ours.candidate_ids[:, slot], ours.candidate_probs[:, slot], made.vocab_size)
            assert (found - exact).abs().sum(dim=1).max() <= 20 * MAX_ERROR
            assert (found.gather(1, drafts[:, None]) > 0).all()
        if made.confidence is not None and ours.confidences is not None:
            torch.testing.assert_close(ours.confidences[:, slot], candidates.confidence, rtol=0, atol=MAX_ERROR)
        previous = drafts


def check(made: Made, params: list[SamplingParams] | None) -> Walked:
    ours, twins = made.walked(OURS, params), made.walked(TWIN, params)
    check_steps(made, ours, params)
    if not IS_NATIVE or made.markov is None or made.markov.joint is None:
        assert torch.equal(ours.token_ids, twins.token_ids)
    assert [each is None for each in ours] == [each is None for each in twins]
    return ours


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_walk_slot_by_slot(kind: MarkovKind | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "JOINT_COLUMNS"):
        monkeypatch.setattr(walk_kernel, name, 4)  # of 6
    made = Made(kind, **SIZES)
    drafts = check(made, SOME).token_ids
    assert torch.equal(check(made, None).token_ids[0], drafts[0])  # SOME[0] is greedy
    assert len(drafts.unique()) > 4


@pytest.mark.parametrize(("kind", "by_draft_id"), [(None, False), ("vanilla", False), ("vanilla", True)])
def test_reduced_vocabularies(kind: str | None, by_draft_id: bool) -> None:
    made = Made(kind and MarkovKind(kind), draft_vocab_size=48, by_draft_id=by_draft_id, **SIZES)
    drafts = check(made, SOME).token_ids
    assert bool((drafts % 2 == 0).all())  # target ids
    assert bool((made.anchors % 2 == 1).all())  # none of them is one of the drafter's


@pytest.mark.parametrize("params", [None, [PARAMS[0], PARAMS[9], PARAMS[0]]])
def test_ties_go_to_the_better_base_logit(params: list[SamplingParams] | None) -> None:
    made = Made(MarkovKind.VANILLA, numbers=whole, confidence=None, **SIZES | {"num_candidates": 96})
    walk, previous, num_ties = made.walk(), made.anchors, 0
    for _ in range(walk.num_drafts):
        candidates = walk.step(previous)
        num_ties += int((candidates.logits[:, 0] == candidates.logits[:, 1]).sum())
        previous = candidates.ids[:, 0]
    assert num_ties > 1
    check(made, params)


@pytest.mark.parametrize("confidence", [None, "hidden"])
def test_confidence_may_be_absent_or_read_hidden_states_alone(confidence: str | None) -> None:
    check(Made(MarkovKind.GATED, confidence=confidence, **SIZES), None)


@pytest.mark.parametrize("kind", [None, MarkovKind.GATED])
def test_spare_requests_get_zeros_and_disturb_nobody(kind: MarkovKind | None) -> None:
    made = Made(kind, **SIZES)
    seats, alone = ids(3, -1, 1), Made(kind, **SIZES)
    for params in (None, SOME):
        ours, expected = made.walked(OURS, params, seats), alone.walked(OURS, params)
        for found, exact in zip(ours[:1] + ours[2:], expected[:1] + expected[2:], strict=True):
            if found is not None and exact is not None:
                assert not found[1].any()
                assert torch.equal(found[seats >= 0], exact[seats >= 0])


def test_heads_may_be_in_few_bits() -> None:
    found, exact = Made(MarkovKind.VANILLA, **SIZES), Made(MarkovKind.VANILLA, **SIZES)
    values, scales = whole(96, 6, seed=1).to(torch.int8), rough(96, 1, seed=2).float()
    numbers = (values * scales).to(DTYPE)
    found.markov = MarkovHead(
        MarkovKind.VANILLA, OURS, LowBitMatrix(values, scales), LowBitMatrix(values, scales), None, None
    )
    exact.markov = MarkovHead(MarkovKind.VANILLA, TWIN, numbers, numbers, None, None)
    assert torch.equal(found.walked(OURS).token_ids, exact.walked(TWIN).token_ids)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "num_requests"), [(None, 16), ("vanilla", 1), ("vanilla", 16), ("gated", 4), ("rnn", 4)]
)
def test_walks_at_full_size(kind: str | None, num_requests: int) -> None:
    made = Made(kind and MarkovKind(kind), **FULL | {"num_requests": num_requests})
    check(made, None)
    check(made, (SAMPLED * 4)[:num_requests])


@pytest.mark.gpu
def test_a_reduced_vocabulary_at_full_size() -> None:
    made = Made(MarkovKind.VANILLA, draft_vocab_size=32_768, by_draft_id=True, **FULL)
    check(made, None)
    check(made, SAMPLED)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [MarkovKind.VANILLA, MarkovKind.RNN])
def test_a_captured_walk_is_the_same(kind: MarkovKind) -> None:
    """And reads nothing back."""
    made = Made(kind, **FULL | {"vocab_size": 32_768})
    asked, walk = sampling(SAMPLED, DEVICE), made.walk()
    starts = WalkStarts(made.anchors, ids(0, 1, -1, 3), made.positions)
    expected = [OURS.walk(walk, starts, each) for each in (None, asked)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [OURS.walk(walk, starts, each) for each in (None, asked)]
    for _ in range(2):
        graph.replay()
        for found, exact in zip(captured, expected, strict=True):
            assert torch.equal(found.token_ids, exact.token_ids)
        assert torch.equal(captured[1].candidate_probs, expected[1].candidate_probs)
