"""One cycle: each request is judged by its own rule, and only what became text is committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.cycle import accept, match_choices, match_choices_on_device, run_cycle
from outrider.engine.rejection import DraftBlock, Verdict, point_mass_block
from outrider.kernels.sampler import TorchSampler
from tests.scripted import FixedProposer, ScriptedProposer, TableTarget, make_test_engine, run_requests
from tests.statistics import assert_chi_square, assert_frequencies, sequence_probs

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
TABLE = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.3, 0.45], [0.35, 0.25, 0.4]], dtype=torch.float64).log()
NUM_REQUESTS = 400


def make_batch(*params: SamplingParams, lengths: tuple[int, ...]) -> CycleBatch:
    count = len(params)
    return CycleBatch(
        seats=torch.arange(count),
        anchor_token_ids=torch.zeros(count, dtype=torch.int64),
        anchor_positions=torch.arange(count) + 3,
        draft_lengths=torch.tensor(lengths),
        host_positions=tuple(range(3, 3 + count)),
        host_lengths=lengths,
        params=params,
        noise_seeds=tuple(range(count)),
        adjustments=(None,) * count,
        outputs=((),) * count,
    )


def judge(batch: CycleBatch, draft: DraftBlock, logits: Tensor, row_index: Tensor) -> tuple[Verdict, Tensor]:
    """`accept` with given logits [R, V]: the hidden state of a row is its number."""
    rows = torch.arange(len(logits), dtype=torch.float64)[:, None]
    return accept(batch, draft, TableTarget(logits), rows, row_index)[:2]  # type: ignore[arg-type]


def random_drafts(batch: CycleBatch, draft_length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, (len(batch.seats), draft_length), generator=generator)


def make_random() -> FixedProposer:
    generator = torch.Generator().manual_seed(5)
    return FixedProposer(choose=lambda batch, length: random_drafts(batch, length, generator))


def make_constant() -> FixedProposer:
    return FixedProposer(choose=lambda batch, length: torch.full((len(batch.seats), length), 2))


def make_unlikely() -> FixedProposer:
    """Always the next token that the target likes least after the anchor."""
    return FixedProposer(
        choose=lambda batch, length: TABLE.argmin(dim=1)[batch.anchor_token_ids][:, None].expand(-1, length)
    )


def make_sampled() -> FixedProposer:
    return FixedProposer(torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), max_draft_length=3)


PROPOSERS: dict[str, Callable[[], FixedProposer | None]] = {
    "none": lambda: None,
    "random": make_random,
    "constant": make_constant,
    "unlikely": make_unlikely,
    "sampled": make_sampled,
}


@pytest.mark.parametrize(
    ("name", "seeded"), [("random", False), ("sampled", False), ("none", True)], ids=["random", "sampled", "matching"]
)
def test_three_tokens_follow_the_exact_distribution(name: str, seeded: bool) -> None:
    engine = make_test_engine(
        TableTarget(TABLE), PROPOSERS[name](), max_seats=NUM_REQUESTS, row_budget=5 * NUM_REQUESTS, seed=1
    )
    params = [replace(SAMPLED, max_tokens=3, seed=i if seeded else None) for i in range(NUM_REQUESTS)]
    sequences = run_requests(engine, *(([0], each) for each in params))
    assert_chi_square(map(tuple, sequences), sequence_probs(TABLE, 0, 3))


@pytest.mark.parametrize("name", ["random", "unlikely", "sampled"])
def test_three_tokens_follow_the_exact_distribution_by_block_verification(name: str) -> None:
    engine = make_test_engine(
        TableTarget(TABLE),
        PROPOSERS[name](),
        max_seats=NUM_REQUESTS,
        row_budget=5 * NUM_REQUESTS,
        seed=1,
        acceptance="block",
    )
    sequences = run_requests(engine, *[([0], replace(SAMPLED, max_tokens=3))] * NUM_REQUESTS)
    assert_chi_square(map(tuple, sequences), sequence_probs(TABLE, 0, 3))


def test_an_engine_told_so_keeps_more_by_block_verification() -> None:
    num_accepted = {}
    for acceptance in ("rejection", "block"):
        proposer = FixedProposer(torch.tensor([2.0, 1.0], dtype=torch.float64) / 3, max_draft_length=2)
        target = TableTarget.constant([1 / 3, 2 / 3])
        engine = make_test_engine(target, proposer, context_length=1024, seed=2, acceptance=acceptance)
        request = engine.add([0], SAMPLED)
        while engine.has_work:
            engine.step()
        num_accepted[acceptance] = request.acceptance.num_accepted_tokens
    assert num_accepted["block"] > num_accepted["rejection"]


@pytest.mark.parametrize("name", PROPOSERS)
def test_every_token_follows_the_target_whatever_is_drafted(name: str) -> None:
    target = TableTarget.constant([0.25, 0.45, 0.30])
    engine = make_test_engine(target, PROPOSERS[name](), context_length=401, seed=2)
    (token_ids,) = run_requests(engine, ([0], SAMPLED))
    assert_frequencies(token_ids, [0.25, 0.45, 0.30])
    assert_chi_square(token_ids, {0: 0.25, 1: 0.45, 2: 0.30})


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_is_the_argmax_whatever_is_drafted(name: str) -> None:
    engine = make_test_engine(TableTarget(TABLE.roll(1, dims=1)), PROPOSERS[name]())
    (token_ids,) = run_requests(engine, ([0], replace(GREEDY, max_tokens=12)))
    assert token_ids == [1, 0] * 6


def test_match_sampling_is_the_same_text_with_any_drafter() -> None:
    texts = set()
    for make in PROPOSERS.values():
        engine = make_test_engine(TableTarget(TABLE), make())
        (token_ids,) = run_requests(engine, ([0], replace(SAMPLED, seed=8, max_tokens=60)))
        texts.add(tuple(token_ids))
    assert len(texts) == 1


def test_each_request_is_judged_by_its_own_rule() -> None:
    certain = replace(SAMPLED, top_k=1)
    batch = make_batch(GREEDY, certain, replace(certain, seed=3), GREEDY, lengths=(2, 2, 1, 0))
    draft = point_mass_block(torch.tensor([[1, 2], [1, 0], [1, 2], [1, 2]]), torch.float64)
    logits = torch.eye(4, dtype=torch.float64)[[1, 2, 3, 1, 2, 3, 1, 2, 3]] * 9  # rows want 1, 2, 3; 1, 2, 3; …
    row_index = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 7], [8, 8, 8]])
    verdict, is_finite = judge(batch, draft, logits, row_index)
    assert verdict.num_accepted_tokens.tolist() == [2, 1, 1, 0]
    assert verdict.target_token_ids.tolist() == [3, 2, 2, 3]
    assert is_finite.all()


def test_seeded_choices_on_a_device_are_those_of_a_cpu() -> None:
    rows = list(torch.randn(4, 90, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2)
    params = [replace(SAMPLED, seed=seed, top_k=40, top_p=0.9, min_p=0.01) for seed in range(40)]
    batch = make_batch(*params, lengths=(3, 2, 0, 1) * 10)
    for request in range(len(params)):
        choices = match_choices_on_device(batch, request, rows, TorchSampler())
        assert choices.tolist() == match_choices(batch, request, rows).tolist()


def test_ties_go_to_the_lowest_id() -> None:
    batch = make_batch(GREEDY, lengths=(0,))
    nothing = point_mass_block(torch.zeros(1, 0, dtype=torch.int64), torch.float64)
    verdict, _ = judge(batch, nothing, torch.tensor([[0.0, 7.0, 7.0]]), torch.tensor([[0]]))
    assert verdict.target_token_ids.tolist() == [1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, seed=1)], ids=["greedy", "rejection", "matching"])
def test_only_the_request_with_bad_logits_is_called_bad(bad: float, params: SamplingParams) -> None:
    batch = make_batch(params, params, lengths=(1, 1))
    draft = point_mass_block(torch.tensor([[1], [1]]), torch.float64)
    logits = torch.zeros(4, 3, dtype=torch.float64)
    logits[3, 2] = bad
    _, is_finite = judge(batch, draft, logits, torch.tensor([[0, 1], [2, 3]]))
    assert is_finite.tolist() == [True, False]


def test_a_token_ruled_out_by_minus_infinity_is_no_fault() -> None:
    batch = make_batch(SAMPLED, lengths=(0,))
    nothing = point_mass_block(torch.zeros(1, 0, dtype=torch.int64), torch.float64)
    verdict, is_finite = judge(batch, nothing, torch.tensor([[-torch.inf, 0.0, -torch.inf]]), torch.tensor([[0]]))
    assert (verdict.target_token_ids.tolist(), is_finite.tolist()) == ([1], [True])


def test_anchor_and_accepted_drafts_are_committed_and_spare_rows_are_not() -> None:
    table = torch.eye(5, dtype=torch.float64).roll(1, dims=1)  # 0, 1, 2, 3, 4, 0, …
    text = [i % 5 for i in range(20)]
    proposer = ScriptedProposer([text[:3], text], script=(2,), vocab_size=5)
    batch = replace(make_batch(GREEDY, lengths=(4,)), seats=torch.tensor([1]), anchor_token_ids=torch.tensor([3]))
    result = run_cycle(batch, target=TableTarget(table), caches=(), proposer=proposer, rows_per_pass=8)  # type: ignore[arg-type]
    assert result.judged.verdict.num_accepted_tokens.tolist() == [2]
    assert result.judged.verdict.target_token_ids.tolist() == [1]
    (commit,) = proposer.commits
    assert (commit.seats, commit.positions) == ([1, 1, 1], [3, 4, 5])
    assert commit.taps.flatten().tolist() == [3.0, 4.0, 0.0]


def test_requests_without_drafts_ask_for_none() -> None:
    proposer = ScriptedProposer([[0] * 9], vocab_size=3)
    run_cycle(
        make_batch(GREEDY, lengths=(0,)),
        target=TableTarget(TABLE),
        caches=(),
        proposer=proposer,
        rows_per_pass=None,  # type: ignore[arg-type]
    )
    assert proposer.asked == []
    assert len(proposer.commits) == 1
