"""The device's cycle, run as it is on a CPU: the twin of what CUDA replays, and equal to `run_cycle` in all it leaves.

Seen red: the last request's drafts left out; a planned count left out; the tokens of an aborted request taken;
numbers read in `pack_rows`, or brought to it; candidates of another slot; rows sampled as request 0's; noise of the
anchor's place for every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.core import Chunk, SamplingParams
from outrider.engine import graphs
from outrider.engine.batch import Anchors
from outrider.engine.engine import Engine
from outrider.engine.graphs import SPARE_REQUEST, Beginning, DeviceCycle, bucket_of, buckets_up_to
from outrider.engine.proposer import DFlashProposer, FencedProposer
from outrider.engine.rejection import DraftBlock
from outrider.engine.sampling import filtered_probs
from outrider.engine.state import RequestState
from outrider.kernels.sampler import Sampling, TorchSampler
from outrider.models.drafter_config import MarkovKind
from tests.cases.common import snapshot, toy_proposer
from tests.counted_space import CountedSpace
from tests.paged import paged_engine
from tests.scripted import ScriptedProposer, TableTarget, make_test_engine, run_requests
from tests.statistics import assert_chi_square, sequence_probs
from tests.toy import reference_greedy, toy_drafter, toy_dspark, toy_target

TARGET = toy_target()
NUM_SEATS, NUM_TOKENS = 5, 12
PROMPTS = ([5, 17, 80], [3], [44, 9, 61, 2, 33, 70, 12, 8, 50], [7, 7, 21, 90, 4])
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)
RAGGED = [replace(GREEDY, num_speculative_tokens=length) for length in (None, 1, 3, 0)]
MIXED = [GREEDY, replace(GREEDY, temperature=1.0, seed=5, max_tokens=4), replace(GREEDY, logprobs=1), GREEDY]


def dspark(kind: MarkovKind, draft_vocab_size: int | None = None) -> DFlashProposer:
    drafter = toy_dspark(TARGET, kind=kind, draft_vocab_size=draft_vocab_size)
    return toy_proposer(drafter, num_seats=NUM_SEATS)


PROPOSERS: dict[str, Callable[[], DFlashProposer | None]] = {
    "none": lambda: None,
    "dflash": lambda: toy_proposer(toy_drafter(TARGET), num_seats=NUM_SEATS),
    "reduced": lambda: toy_proposer(toy_drafter(TARGET, draft_vocab_size=48), num_seats=NUM_SEATS),
    "vanilla": lambda: dspark(MarkovKind.VANILLA),
    "gated": lambda: dspark(MarkovKind.GATED),
    "rnn": lambda: dspark(MarkovKind.RNN, draft_vocab_size=48),
}


def on_device(engine: Engine) -> Engine:
    """The engine as it is on CUDA, but for the capture."""
    engine.use_device_cycle()
    assert engine.device_cycle is not None
    engine.warm_up()
    return engine


def finished(engine: Engine, params: Sequence[SamplingParams]) -> list[Any]:
    """All that a run leaves of each request."""
    requests = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    chunks: list[Chunk] = []
    while engine.has_work:
        chunks += engine.step()
    told = [
        [token for chunk in chunks if chunk.request_index == r.index for token in chunk.token_ids] for r in requests
    ]
    assert told == [request.output_token_ids for request in requests]
    return [(request.output_token_ids, request.finish_reason, request.acceptance) for request in requests]


class TensorScript:
    """The target's own text after each seat's prompt, some slots spoiled: a function of tensors."""

    name = "tensor script"
    tap_layers: tuple[int, ...] = ()
    num_candidates = 1
    max_draft_length, default_draft_length = 6, 4

    def __init__(self, texts: Tensor) -> None:
        self.texts = texts  # int64 [S, P]

    def propose(self, batch: Anchors, draft_length: int) -> DraftBlock:
        return self.propose_on_device(batch, draft_length)

    def propose_on_device(self, anchors: Anchors, draft_length: int, sampling: Sampling | None = None) -> DraftBlock:
        slots = torch.arange(draft_length, device=self.texts.device)
        places = (anchors.anchor_positions[:, None] + 1 + slots).clamp_max(self.texts.shape[1] - 1)
        drafts = self.texts[anchors.seats.clamp_min(0)[:, None], places]
        is_spoiled = slots == (anchors.anchor_positions * 3 % 5)[:, None]
        drafts = torch.where(is_spoiled, (drafts + 1) % 96, drafts)
        return DraftBlock(drafts, drafts[..., None], torch.ones_like(drafts, dtype=torch.float64)[..., None])

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        pass


def scripted() -> TensorScript:
    texts = [[*prompt, *reference_greedy(TARGET, prompt, NUM_TOKENS)] for prompt in PROMPTS]
    return TensorScript(torch.tensor([text + [0] * (40 - len(text)) for text in texts]))


@pytest.mark.parametrize("name", PROPOSERS)
def test_texts_verdicts_and_caches_are_those_of_run_cycle(name: str) -> None:
    first, second = PROPOSERS[name](), PROPOSERS[name]()
    expected = make_test_engine(TARGET, first, max_seats=NUM_SEATS)
    engine = on_device(make_test_engine(TARGET, second and FencedProposer(second), max_seats=NUM_SEATS))
    assert finished(engine, RAGGED) == finished(expected, RAGGED)
    caches = [(expected.caches, engine.caches)]
    if first is not None and second is not None:
        caches.append((first.caches, second.caches))
    for ours, theirs in caches:
        assert any(bool(each.any()) for each in snapshot(ours))
        for mine, other in zip(snapshot(ours), snapshot(theirs), strict=True):
            torch.testing.assert_close(mine, other)


def test_every_count_of_accepted_drafts_occurs() -> None:
    expected = finished(make_test_engine(TARGET, scripted(), max_seats=4), [GREEDY] * 4)
    engine = on_device(make_test_engine(TARGET, scripted(), max_seats=4))
    found = finished(engine, [GREEDY] * 4)
    assert found == expected
    assert {count for _, _, stats in found for count in stats.accepted_histogram} == {0, 1, 2, 3, 4}
    longer = replace(GREEDY, num_speculative_tokens=6)
    assert [each[0] for each in finished(engine, [longer] * 4)] == [each[0] for each in expected]


@pytest.mark.parametrize("name", ["none", "dflash", "gated"])
def test_other_requests_come_and_go(name: str) -> None:
    expected = finished(make_test_engine(TARGET, PROPOSERS[name](), max_seats=NUM_SEATS), MIXED)
    engine = on_device(make_test_engine(TARGET, PROPOSERS[name](), max_seats=NUM_SEATS))
    assert finished(engine, MIXED) == expected


class TableDrafts:
    """Draws every draft from the same distribution [V], by the noise of its request: a function of tensors."""

    name = "table drafts"
    tap_layers: tuple[int, ...] = ()
    max_draft_length = default_draft_length = 2

    def __init__(self, probs: Sequence[float]) -> None:
        self.logits, self.num_candidates = torch.tensor(probs, dtype=torch.float64).log(), len(probs)

    def propose(self, batch: Anchors, draft_length: int) -> DraftBlock:
        raise AssertionError("not the device's cycle")

    def propose_on_device(self, anchors: Anchors, draft_length: int, sampling: Sampling | None = None) -> DraftBlock:
        assert sampling is not None
        ids = torch.arange(self.num_candidates).expand(len(anchors.seats), -1)
        logits = self.logits.expand_as(ids)
        slots = [
            TorchSampler().draw(ids, logits, sampling, anchors.anchor_positions, slot) for slot in range(draft_length)
        ]
        drafts, probs = (torch.stack(parts, dim=1) for parts in zip(*slots, strict=True))
        return DraftBlock(drafts, ids[:, None].expand_as(probs), probs)

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        pass


@pytest.mark.parametrize("is_seeded", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2, "temperature": 0.8}], ids=["plain", "filtered"])
def test_three_tokens_follow_the_exact_distribution(is_seeded: bool, filters: dict[str, float]) -> None:
    table = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.3, 0.45], [0.35, 0.25, 0.4]], dtype=torch.float64).log()
    proposer = TableDrafts([0.2, 0.5, 0.3])
    engine = make_test_engine(TableTarget(table), proposer, max_seats=400, row_budget=1200, seed=1)
    engine.use_device_cycle()
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 3, **filters})
    texts = run_requests(engine, *(([0], replace(params, seed=i if is_seeded else None)) for i in range(400)))
    if filters:
        table = torch.stack([filtered_probs(row, params).log() for row in table])
    chances = {text: chance for text, chance in sequence_probs(table, 0, 3).items() if chance > 0}
    assert_chi_square(map(tuple, texts), chances)


SEEDED = replace(GREEDY, temperature=1.0, seed=5)
SEEDED_ONES = [SEEDED, replace(SEEDED, top_k=5, temperature=0.7), replace(SEEDED, seed=-9, top_p=0.8), GREEDY]


@pytest.mark.parametrize("name", ["none", "dflash", "rnn"])
def test_seeded_texts_are_those_of_run_cycle_and_of_plain_decoding(name: str) -> None:
    plain = [each[0] for each in finished(make_test_engine(TARGET, max_seats=NUM_SEATS), SEEDED_ONES)]
    engine = make_test_engine(TARGET, PROPOSERS[name](), max_seats=NUM_SEATS)
    engine.use_device_cycle()
    assert [each[0] for each in finished(engine, SEEDED_ONES)] == plain
    shorter = [replace(each, num_speculative_tokens=1 if each.seed == 5 else 0) for each in SEEDED_ONES]
    assert [each[0] for each in finished(engine, shorter)] == plain
    beside = [*SEEDED_ONES[:3], replace(GREEDY, logprobs=1, max_tokens=5)]  # runs on the host for a while
    assert [each[0] for each in finished(engine, beside)] == [*plain[:3], plain[3][:5]]


def test_sampled_requests_keep_drafts() -> None:
    engine = make_test_engine(TableTarget.constant([0.5, 0.3, 0.2]), TableDrafts([0.5, 0.3, 0.2]), max_seats=2)
    engine.use_device_cycle()
    requests = [engine.add([0], replace(GREEDY, temperature=1.0, max_tokens=40, seed=seed)) for seed in (None, 4)]
    while engine.has_work:
        engine.step()
    for request in requests:  # draft and target are equal, and so is their noise where there is a seed
        assert request.acceptance.num_accepted_tokens > 0.97 * request.acceptance.num_draft_tokens > 20


def test_some_cycles_are_left_to_run_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_test_engine(TableTarget.constant([0.2, 0.8]), max_seats=3)
    unseeded = replace(SEEDED, seed=None)

    def takes(*params: SamplingParams, acceptance: str = "rejection") -> bool:
        cycle = DeviceCycle(engine.target, engine.caches, None, max_seats=3, context_length=64, acceptance=acceptance)
        return cycle.takes([engine.make_request([1], each) for each in params], [0] * len(params))

    assert takes(GREEDY, SEEDED, unseeded)
    assert takes(GREEDY, SEEDED, acceptance="block")
    assert not takes(GREEDY, unseeded, acceptance="block")
    for field in ({"logprobs": 0}, {"logit_bias": {1: 2.0}}, {"presence_penalty": 1.0}):
        assert not takes(SEEDED, replace(GREEDY, **field))  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "MAX_LOGITS_BYTES", 4 * 2 * 2)
    assert takes(SEEDED, GREEDY)
    assert takes(GREEDY, GREEDY, GREEDY)
    assert not takes(SEEDED, GREEDY, GREEDY)


def test_constant_shapes_are_kept() -> None:
    target = TableTarget.constant([0.2, 0.8])
    engine = make_test_engine(target, max_seats=1, rows_per_pass=7, prefill_rows=7)
    run_requests(on_device(engine), ([1] * 8, GREEDY))
    assert {len(rows.seats) for rows in target.passes} == {7}


def test_rows_come_in_buckets() -> None:
    target = TableTarget.constant([0.2, 0.8])
    engine = on_device(make_test_engine(target, max_seats=20))
    target.passes = []
    run_requests(engine, *[([1], GREEDY)] * 20)
    assert {len(rows.seats) for rows in target.passes if len(rows.seats) > 1} == {32}
    assert [bucket_of(count) for count in (1, 2, 3, 9)] == [1, 2, 4, 16]
    assert (bucket_of(17), bucket_of(9, most=12)) == (32, 12)
    assert (buckets_up_to(6, most=6), buckets_up_to(9)) == ([1, 2, 4, 6], [1, 2, 4, 8, 16])


@pytest.mark.parametrize("num_pages", [8, 9, 12])
def test_a_preempted_request_writes_the_same(num_pages: int) -> None:
    engine = make_test_engine(TARGET, PROPOSERS["dflash"](), max_seats=NUM_SEATS, space=CountedSpace(num_pages))
    found = finished(on_device(engine), RAGGED)
    assert engine.scheduler.num_preemptions > 0
    assert [each[0] for each in found] == [reference_greedy(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]


def test_pages_are_reserved_ahead_and_come_back() -> None:
    engine, kv_cache = paged_engine(TARGET, toy_drafter(TARGET), max_seats=3)
    found = finished(on_device(engine), RAGGED)
    assert [each[0] for each in found] == [reference_greedy(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]
    kv_cache.assert_consistent()
    assert kv_cache.num_free_pages == kv_cache.num_pages


def test_a_request_may_be_dropped_while_its_cycle_is_under_way() -> None:
    engine = on_device(make_test_engine(TARGET, PROPOSERS["dflash"](), max_seats=2))
    dropped, kept = engine.add(PROMPTS[0], GREEDY), engine.add(PROMPTS[2], GREEDY)
    for _ in range(3):
        engine.step()
    num_tokens = len(dropped.output_token_ids)
    engine.abort(dropped)
    late = engine.add(PROMPTS[3], GREEDY)  # gets the seat at once
    chunks: list[Chunk] = []
    while engine.has_work:
        chunks += engine.step()
    assert (len(dropped.output_token_ids), dropped.finish_reason) == (num_tokens, "abort")
    assert not [chunk for chunk in chunks if chunk.request_index == dropped.index]
    expected = [reference_greedy(TARGET, prompt, NUM_TOKENS) for prompt in (PROMPTS[2], PROMPTS[3])]
    assert [kept.output_token_ids, late.output_token_ids] == expected


def test_only_the_request_with_bad_logits_fails() -> None:
    table = torch.full((4, 4), -torch.inf)
    table[[0, 1, 2, 3], [1, 0, 3, 0]] = 0.0
    table[3] = torch.nan
    engine = on_device(make_test_engine(TableTarget(table), max_seats=3))
    requests = [engine.add(prompt, GREEDY) for prompt in ([0], [2], [1])]
    while engine.has_work:
        engine.step()
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]


class CountingScript(TensorScript):
    """Notes where requests stand whenever it drafts."""

    def __init__(self, texts: Tensor) -> None:
        super().__init__(texts)
        self.stands: list[list[tuple[int, int, int]]] = []

    def propose_on_device(self, anchors: Anchors, draft_length: int, sampling: Sampling | None = None) -> DraftBlock:
        columns = anchors.seats, anchors.anchor_token_ids, anchors.anchor_positions
        self.stands.append(list(zip(*(column.tolist() for column in columns), strict=True)))
        return super().propose_on_device(anchors, draft_length, sampling)


def test_drafts_are_begun_ahead_from_where_the_host_will_see_the_requests() -> None:
    proposer = CountingScript(scripted().texts)
    engine = on_device(make_test_engine(TARGET, proposer, max_seats=2))
    requests = [engine.add(PROMPTS[0], GREEDY), engine.add(PROMPTS[1], replace(GREEDY, max_tokens=6))]
    while not all(request.output_token_ids for request in requests):
        engine.prefill()
    proposer.stands, expected, num_cycles = [], [], 0
    while not any(request.finish_reason for request in requests):
        engine.step()
        num_cycles += 1
        expected.append([(r.seat, r.output_token_ids[-1], r.anchor_position) for r in requests])
    assert proposer.stands[: len(expected) - 1] == expected[:-1], "each cycle drafts once, for where requests stand"
    assert num_cycles > 2
    while engine.has_work:
        engine.step()
    assert [request.output_token_ids for request in requests] == [
        reference_greedy(TARGET, PROMPTS[0], NUM_TOKENS),
        reference_greedy(TARGET, PROMPTS[1], 6),
    ]


def test_what_has_begun_is_taken_with_a_column_left_empty() -> None:
    proposer = CountingScript(scripted().texts)
    engine = on_device(make_test_engine(TARGET, proposer, max_seats=4))
    short = replace(GREEDY, max_tokens=3)
    requests = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, [GREEDY, short, GREEDY, GREEDY], strict=True)]
    while not all(request.output_token_ids for request in requests):
        engine.prefill()
    while requests[1].finish_reason is None:
        engine.step()
    columns = {stand.request.index: stand.column for stand in engine.device_cycle._under_way}  # type: ignore[union-attr]
    assert columns == {0: 0, 2: 2, 3: 3}
    while engine.has_work:
        engine.step()
    assert [r.output_token_ids for r in requests] == [
        reference_greedy(TARGET, prompt, r.params.max_tokens or 0) for prompt, r in zip(PROMPTS, requests, strict=True)
    ]


def test_what_has_begun_is_dropped_once_a_seat_has_changed_hands() -> None:
    engine = on_device(make_test_engine(TARGET, scripted(), max_seats=4))
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
    while not all(request.output_token_ids for request in requests):
        engine.prefill()
    engine.step()
    cycle = engine.device_cycle
    assert cycle is not None
    assert cycle._begun is not None
    begun = cycle._begun
    engine._collect()
    assert cycle._begun_columns(requests, [1] * 3) == [0, 1, 2]
    assert cycle._begun_columns(requests[1:], [0, 1]) == [1, 2], "a shorter draft is the beginning of a longer one"
    assert cycle._begun_columns(requests, [5] * 3) is None
    assert cycle._begun_columns([*requests, engine.make_request([3], GREEDY)], [1] * 4) is None
    requests[0].output_token_ids.append(5)
    assert cycle._begun_columns(requests, [1] * 3) is None
    requests[0].output_token_ids.pop()
    requests[2].num_preemptions += 1
    assert cycle._begun_columns(requests[:2], [1] * 2) is None
    cycle.launch_ahead()  # it would write where somebody else may be
    assert cycle._begun is begun


class BreakingProposer(TensorScript):
    """Fails after some calls of one of its methods."""

    tap_layers = (1,)

    def __init__(self, texts: Tensor, method: str, num_calls: int) -> None:
        super().__init__(texts)
        self.method, self.calls_left = method, num_calls

    def _count(self, method: str) -> None:
        self.calls_left -= method == self.method
        if self.calls_left < 0:
            raise RuntimeError("out of drafts")

    def propose_on_device(self, anchors: Anchors, draft_length: int, sampling: Sampling | None = None) -> DraftBlock:
        self._count("propose")
        return super().propose_on_device(anchors, draft_length, sampling)

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        self._count("commit")


@pytest.mark.parametrize("num_calls", [0, 6])
@pytest.mark.parametrize("method", ["propose", "commit"])
def test_a_failing_drafter_costs_no_request(method: str, num_calls: int, caplog: pytest.LogCaptureFixture) -> None:
    fenced = FencedProposer(BreakingProposer(scripted().texts, method, num_calls))
    engine = make_test_engine(TARGET, fenced, max_seats=4)
    found = finished(on_device(engine), [GREEDY] * 4)
    assert [each[0] for each in found] == [reference_greedy(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert engine.proposer is None
    assert "out of drafts" in (engine.drafter_fault or "")


def test_a_proposer_that_needs_the_host_is_left_to_run_cycle() -> None:
    engine = make_test_engine(TARGET, FencedProposer(ScriptedProposer([[0] * 40] * 4)), max_seats=4)
    engine.use_device_cycle()
    assert engine.device_cycle is None
    assert finished(engine, [GREEDY] * 4)[0][0] == reference_greedy(TARGET, PROMPTS[0], NUM_TOKENS)


class NotedSpace(CountedSpace):
    """Notes when pages come and go, and when tables go to the device."""

    def __init__(self, num_pages: int, events: list[str]) -> None:
        super().__init__(num_pages)
        self.events = events

    def reserve_ahead(self, seat: int, *, num_committed: int, num_rows: int) -> None:
        self.events.append("ahead")

    def publish(self, seat: int, token_ids: Sequence[int], boundaries: Sequence[int]) -> None:
        super().publish(seat, token_ids, boundaries)
        self.events.append("publish")

    def release(self, seat: int) -> None:
        super().release(seat)
        self.events.append("release")

    def flush(self) -> None:
        self.events.append("flush")


def noted_engine(num_pages: int = 40) -> tuple[Engine, list[str]]:
    events: list[str] = []
    engine = on_device(make_test_engine(TARGET, max_seats=3, space=NotedSpace(num_pages, events)))
    cycle = engine.device_cycle
    assert cycle is not None
    launch = cycle.launch

    def noted_launch(requests: Sequence[RequestState], lengths: Sequence[int]) -> None:
        launch(requests, lengths)
        events.append("launch")

    cycle.launch = noted_launch  # type: ignore[method-assign]
    return engine, events


def test_what_the_next_launch_does_not_need_comes_after_it() -> None:
    engine, events = noted_engine()
    short, long = engine.add([3], replace(GREEDY, max_tokens=3)), engine.add([4], GREEDY)
    engine.prefill()
    steps = []
    while short.finish_reason is None:
        events.clear()
        chunks = engine.step()
        steps.append(list(events))
    assert steps == [
        ["flush", "launch", "flush"],
        ["flush", "launch", "publish", "ahead", "publish", "ahead", "flush"],
        ["flush", "launch", "publish", "release", "publish", "ahead", "flush"],
    ]
    assert [chunk.finish_reason for chunk in chunks] == ["length", None]
    assert (short.seat, long.seat) == (-1, 1)


def test_pages_of_those_that_have_ended_are_taken_before_anyone_gives_way() -> None:
    engine, events = noted_engine(num_pages=3)
    engine.add([3], replace(GREEDY, max_tokens=4))
    long = engine.add([4], replace(GREEDY, max_tokens=11))
    events.clear()
    while engine.has_work:
        engine.step()
    assert (engine.scheduler.num_preemptions, long.finish_reason) == (0, "length")
    early = [pair for pair in pairwise(events) if pair[0] == "release" and pair[1] == "flush"]
    assert early, "nobody was short of pages"


def test_those_that_have_ended_leave_though_a_launch_breaks() -> None:
    engine, _ = noted_engine()
    cycle = engine.device_cycle
    assert cycle is not None
    limits = (2, 4)  # nobody asks for a page any more
    ended, other = (engine.add([3], replace(GREEDY, max_tokens=limit)) for limit in limits)
    engine.prefill()
    engine.step()
    launch, cycle.launch = cycle.launch, lambda *given: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    cycle.launch = launch  # type: ignore[method-assign]
    for _ in range(4):
        engine.step()
    assert not engine.has_work
    assert (ended.finish_reason, other.finish_reason, engine.scheduler.space.num_free) == ("length", "length", 40)


def test_the_hosts_time_is_from_a_wait_to_the_launch_after_it() -> None:
    engine, _ = noted_engine()
    cycle = engine.device_cycle
    assert cycle is not None
    engine.add([3], replace(GREEDY, max_tokens=4))
    engine.prefill()
    assert cycle.host_s is None
    engine.step()
    assert cycle.host_s is None  # nothing was waited for
    engine.step()
    assert cycle.host_s is not None
    assert 0 < cycle.launch_s < cycle.host_s
    while engine.has_work:
        engine.step()
    assert cycle.host_s is None  # nothing was launched


def test_a_table_is_read_when_a_function_runs_and_a_warm_up_leaves_nothing_in_it() -> None:
    engine, _ = noted_engine()
    cycle = engine.device_cycle
    assert cycle is not None
    request = engine.add([3], replace(GREEDY, max_tokens=4))
    engine.prefill()
    before = snapshot(engine.caches)
    with torch.inference_mode():
        cycle.launch([request], [0])
        cycle.wait()
        after = snapshot(engine.caches)
        cycle.warm_up(4)
        assert cycle._requests.T.tolist() == [list(SPARE_REQUEST)] * 3
    assert any(not torch.equal(first, second) for first, second in zip(before, after, strict=True))
    assert all(torch.equal(first, second) for first, second in zip(after, snapshot(engine.caches), strict=True))


def test_the_largest_of_each_form_is_captured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a small one leaves in the pool would serve no larger one."""
    engine = make_test_engine(TARGET, scripted(), max_seats=3)
    engine.use_device_cycle()
    cycle = engine.device_cycle
    assert cycle is not None
    keys: list[Any] = []
    monkeypatch.setattr(cycle.graphs, "run", lambda half, key, function, part=None: keys.append(key))
    cycle.warm_up(8)
    assert {key for key in keys if isinstance(key, str)} == {"load", "advance"}
    for is_sampled in (False, True):
        drafts = [key.num_requests for key in keys if isinstance(key, Beginning) and key.is_sampled == is_sampled]
        assert drafts == [3, 2, 1]
        assert [key[1] for key in keys if key[0] == "verify" and key[2] == is_sampled] == [8, 4, 2, 1]


def test_on_a_cpu_it_is_not_used() -> None:
    assert make_test_engine(TARGET).device_cycle is None


class NothingRead(TorchDispatchMode):
    """Refuses what would make a device wait for the host, or the host for a device."""

    REFUSED = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal")
    REFUSED_AS_WELL = ("resolve_conj", "lift_fresh")  # of `tolist`, and of a tensor made from the host's numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.REFUSED + self.REFUSED_AS_WELL), f"{name} reads from the device or writes to it"
        masks = [each for index in args[1:2] if name.startswith("index") for each in index if each is not None]
        assert all(mask.dtype != torch.bool for mask in masks), "a mask decides a shape"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "params", [[GREEDY] * 4, SEEDED_ONES, [replace(SEEDED, seed=None)] * 4], ids=["greedy", "seeded", "unseeded"]
)
@pytest.mark.parametrize("name", PROPOSERS)
def test_between_launch_and_result_nothing_is_read(name: str, params: list[SamplingParams]) -> None:
    proposer = PROPOSERS[name]()
    engine = make_test_engine(TARGET, proposer, max_seats=NUM_SEATS)
    requests = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    engine.step()
    cycle = DeviceCycle(TARGET, engine.caches, proposer, max_seats=NUM_SEATS, context_length=64, default_draft_length=4)
    lengths = [4, 2, 0, 3] if proposer is not None else [0] * 4
    with torch.inference_mode(), NothingRead():
        cycle.launch(requests, lengths)
        cycle.launch_ahead()
    assert cycle.wait().draft_lengths == tuple(lengths)
