"""Acceptance rules: counts on blocks small enough to read, distributions against the exact ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.engine.rejection import (
    ACCEPTANCE_RULES,
    DraftBlock,
    accept_by_rejection,
    accept_matching,
    accept_one_by_block,
    accept_one_by_rejection,
    count_leading,
    point_mass_block,
    residual_probs,
)
from outrider.engine.sampling import draw
from tests.statistics import assert_chi_square, assert_frequencies, sequence_probs

NUM_DRAWS = 20_000
TARGET = torch.tensor([0.25, 0.45, 0.30], dtype=torch.float64)


def random_uniforms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampled_block(probs: Tensor, num_drafts: int = 1) -> DraftBlock:
    """NUM_DRAWS requests whose drafts are drawn from probs [V]."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.multinomial(probs, NUM_DRAWS * num_drafts, replacement=True, generator=generator)
    shape = (NUM_DRAWS, num_drafts, len(probs))
    return DraftBlock(token_ids.view(shape[:2]), torch.arange(len(probs)).expand(shape), probs.expand(shape))


def next_tokens(draft: DraftBlock, target: Tensor = TARGET) -> tuple[Tensor, Tensor]:
    """(num_accepted [Q], tokens [Q, K + 1]: accepted drafts and the target's token, -1 after them)."""
    num_requests, num_drafts = draft.token_ids.shape
    lengths = torch.full((num_requests,), num_drafts)
    probs = target.expand(num_requests, num_drafts + 1, -1)
    num_accepted, left = accept_by_rejection(draft, probs, lengths, random_uniforms(num_requests, num_drafts, seed=2))
    added = draw(left, random_uniforms(num_requests, seed=3))
    slots = torch.arange(num_drafts + 1)
    tokens = torch.cat([draft.token_ids, added[:, None]], dim=1)
    tokens = torch.where(slots < num_accepted[:, None], tokens, -1)
    return num_accepted, torch.where(slots == num_accepted[:, None], added[:, None], tokens)


def test_counting_stops_at_the_first_miss_and_at_the_draft_length() -> None:
    kept = torch.tensor([[True, True, False, True], [True] * 4, [False, True, True, True], [True] * 4])
    assert count_leading(kept, torch.tensor([4, 2, 4, 0])).tolist() == [2, 2, 0, 0]


def test_matching_keeps_equal_drafts_and_adds_the_choice_after_them() -> None:
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [9, 6, 7], [5, 6, 7]])
    chosen = torch.tensor([[5, 6, 7, 8]] * 4)
    verdict = accept_matching(drafts, chosen, torch.tensor([3, 1, 3, 0]))
    assert verdict.num_accepted_tokens.tolist() == [3, 1, 0, 0]
    assert verdict.target_token_ids.tolist() == [8, 6, 5, 5]


def test_point_masses_propose_with_certainty() -> None:
    block = point_mass_block(torch.tensor([[3, 1]]), torch.float64)
    assert block.candidate_ids.tolist() == [[[3], [1]]]
    assert block.candidate_probs.tolist() == [[[1.0], [1.0]]]
    assert block.candidate_probs.dtype == torch.float64


def test_residual_is_what_the_draft_left_of_the_target() -> None:
    candidate_probs = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    left = residual_probs(TARGET[None], torch.arange(3)[None], candidate_probs)
    torch.testing.assert_close(left, torch.tensor([[0.0, 0.25, 0.0]], dtype=torch.float64))


def test_residual_of_equal_distributions_is_the_target() -> None:
    left = residual_probs(TARGET[None], torch.arange(3)[None], TARGET[None])
    torch.testing.assert_close(left, TARGET[None])


@pytest.mark.parametrize(
    "probs", [(0.5, 0.2, 0.3), (1.0, 0.0, 0.0), (0.25, 0.45, 0.3), (0.0, 0.0, 1.0), (0.05, 0.05, 0.9)]
)
def test_every_slot_follows_the_target_whatever_is_drafted(probs: tuple[float, ...]) -> None:
    draft_probs = torch.tensor(probs, dtype=torch.float64)
    _, tokens = next_tokens(sampled_block(draft_probs, num_drafts=3))
    for slot in range(4):
        reached = tokens[:, slot][tokens[:, slot] >= 0]
        assert_frequencies(reached.tolist(), TARGET.tolist())


def first_three_tokens(table: Tensor, draft_rows: Tensor) -> list[tuple[int, ...]]:
    """NUM_DRAWS texts after token 0, by cycles of two drafts drawn from draft_rows [V, V] by last token."""
    generator = torch.Generator().manual_seed(4)
    lengths, requests = torch.zeros(NUM_DRAWS, dtype=torch.int64), torch.arange(NUM_DRAWS)
    texts = torch.zeros(NUM_DRAWS, 10, dtype=torch.int64)  # token 0, then at most three tokens a cycle
    for cycle in range(3):
        anchors = texts[requests, lengths]
        first = torch.multinomial(draft_rows[anchors], 1, generator=generator)
        second = torch.multinomial(draft_rows[first[:, 0]], 1, generator=generator)
        drafts, befores = torch.cat([first, second], dim=1), torch.stack([anchors, first[:, 0]], dim=1)
        block = DraftBlock(drafts, torch.arange(3).expand(NUM_DRAWS, 2, 3), draft_rows[befores])
        rows = table[torch.cat([anchors[:, None], drafts], dim=1)]
        uniform = random_uniforms(NUM_DRAWS, 3, seed=10 + cycle)
        num_accepted, left = accept_by_rejection(block, rows, torch.full_like(lengths, 2), uniform[:, :2])
        for slot in range(2):
            texts[requests, lengths + 1 + slot] = drafts[:, slot]
        lengths = lengths + num_accepted + 1
        texts[requests, lengths] = draw(left, uniform[:, 2])
    return [tuple(text) for text in texts[:, 1:4].tolist()]


@pytest.mark.parametrize("adversary", ["random", "constant", "wrong", "own"])
def test_three_tokens_follow_the_exact_distribution(adversary: str) -> None:
    table = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6], [0.4, 0.0, 0.6]], dtype=torch.float64)
    draft_rows = {
        "random": torch.full_like(table, 1 / 3),
        "constant": torch.eye(3, dtype=torch.float64)[[1, 1, 1]],
        "wrong": torch.eye(3, dtype=torch.float64)[table.argmin(dim=1)],
        "own": table,
    }[adversary]
    expected = sequence_probs(table.log(), 0, 3)
    assert_chi_square(first_three_tokens(table, draft_rows), expected)


def test_the_accept_rate_is_the_overlap_of_both_distributions() -> None:
    draft_probs = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    num_accepted, _ = next_tokens(sampled_block(draft_probs))
    assert_frequencies(num_accepted.tolist(), [0.25, 0.75])  # 0.25 + 0.20 + 0.30 is accepted


def test_equal_distributions_accept_everything_and_impossible_drafts_nothing() -> None:
    num_accepted, _ = next_tokens(sampled_block(TARGET, num_drafts=2))
    assert (num_accepted == 2).all()
    point = point_mass_block(torch.zeros(NUM_DRAWS, 2, dtype=torch.int64), torch.float64)
    impossible = torch.tensor([0.0, 0.6, 0.4], dtype=torch.float64)
    num_accepted, tokens = next_tokens(point, impossible)
    assert (num_accepted == 0).all()
    assert_frequencies(tokens[:, 0].tolist(), impossible.tolist())


def test_a_shorter_draft_length_gets_its_token_from_the_row_after_it() -> None:
    draft = point_mass_block(torch.tensor([[0, 1, 2]]), torch.float64)
    probs = torch.eye(4, dtype=torch.float64)[None]  # row i is certain of token i
    num_accepted, left = accept_by_rejection(draft, probs, torch.tensor([1]), torch.full((1, 3), 0.5))
    assert (num_accepted.tolist(), left.argmax(dim=1).tolist()) == ([1], [1])


def test_no_draft_leaves_the_target_alone() -> None:
    draft = point_mass_block(torch.zeros(1, 0, dtype=torch.int64), torch.float64)
    num_accepted, left = accept_by_rejection(draft, TARGET[None, None], torch.tensor([0]), torch.zeros(1, 0))
    assert num_accepted.tolist() == [0]
    assert torch.equal(left, TARGET[None])


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_one_request_at_a_time_is_judged_as_in_a_batch_and_sees_no_row_it_does_not_need(num_drafts: int) -> None:
    uniform = random_uniforms(200, num_drafts, seed=5)
    generator = torch.Generator().manual_seed(6)
    probs = torch.rand(200, num_drafts + 1, 3, generator=generator, dtype=torch.float64).softmax(dim=-1)
    draft_probs = torch.rand(200, num_drafts, 3, generator=generator, dtype=torch.float64).softmax(dim=-1)
    token_ids = torch.randint(3, (200, num_drafts), generator=generator)
    candidate_ids = torch.rand(200, num_drafts, 3, generator=generator).argsort(dim=-1)
    draft = DraftBlock(token_ids, candidate_ids, draft_probs)
    num_accepted, left = accept_by_rejection(draft, probs, torch.full((200,), num_drafts), uniform)
    assert set(num_accepted.tolist()) == set(range(num_drafts + 1))
    for request in range(200):
        asked: list[int] = []

        def row(slot: int, request: int = request, asked: list[int] = asked) -> Tensor:
            asked.append(slot)
            return probs[request, slot]

        one = draft.of(request, draft.token_ids.shape[1])
        count, own_left = accept_one_by_rejection(one, row, uniform[request])
        assert count == num_accepted[request]
        assert torch.equal(own_left, left[request])
        assert asked == list(range(count + 1))


RULES = {"rejection": accept_one_by_rejection, "block": accept_one_by_block}


def test_both_rules_have_their_names() -> None:
    assert ACCEPTANCE_RULES == RULES


def drafted_text(
    rule: str, table: Tensor, draft_rows: Tensor, uniform: Tensor, *, num_drafts: int = 2
) -> tuple[int, list[int]]:
    """One cycle after token 0 with drafts from draft_rows [V, V] by last token: (num_accepted, tokens it adds).

    uniform float64 [2 * num_drafts + 1] draws the drafts, judges them and draws the target's token.
    """
    drafts: list[int] = []
    for slot in range(num_drafts):
        drafts.append(int(draw(draft_rows[drafts[-1] if drafts else 0], uniform[slot])))
    befores = [0, *drafts]
    candidates = torch.arange(len(table)).expand(1, num_drafts, -1)
    block = DraftBlock(torch.tensor([drafts]), candidates, draft_rows[befores[:-1]][None])
    judged = uniform[num_drafts : 2 * num_drafts]
    num_accepted, left = RULES[rule](block, lambda slot: table[befores[slot]], judged)
    return num_accepted, [*drafts[:num_accepted], int(draw(left, uniform[-1]))]


@pytest.mark.parametrize("adversary", ["random", "wrong", "near"])
def test_three_tokens_by_block_verification_follow_the_exact_distribution(adversary: str) -> None:
    table = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6], [0.4, 0.2, 0.4]], dtype=torch.float64)
    draft_rows = {
        "random": torch.full_like(table, 1 / 3),
        "wrong": torch.eye(3, dtype=torch.float64)[table.argmin(dim=1)],
        "near": 0.7 * table + 0.3 * table.roll(1, dims=1),
    }[adversary]
    texts = []
    for i, uniform in enumerate(random_uniforms(1300, 7, seed=6)):
        _, text = drafted_text("block", table, draft_rows, uniform, num_drafts=3)
        rest = random_uniforms(3, seed=10_000 + i)
        while len(text) < 3:  # what a cycle leaves open is the target's own
            text.append(int(draw(table[text[-1]], rest[len(text)])))
        texts.append(tuple(text[:3]))
    assert_chi_square(texts, sequence_probs(table.log(), 0, 3))


def test_block_verification_keeps_what_the_paper_says() -> None:
    """Target (1/3, 2/3), draft (2/3, 1/3), two drafts: 10/9 tokens by rejection and 11/9 by block (Sun et al. §2)."""
    table = torch.tensor([[1.0, 2.0], [1.0, 2.0]], dtype=torch.float64) / 3
    uniform = random_uniforms(1500, 5, seed=7)
    means = {
        rule: sum(drafted_text(rule, table, table.flip(1), each)[0] for each in uniform) / len(uniform)
        for rule in RULES
    }
    assert means["rejection"] == pytest.approx(10 / 9, abs=0.05)
    assert means["block"] == pytest.approx(11 / 9, abs=0.05)


def test_one_draft_is_judged_alike_by_both_rules() -> None:
    table = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64)
    draft_rows = torch.tensor([[0.2, 0.2, 0.6]] * 3, dtype=torch.float64)
    for uniform in random_uniforms(200, 3, seed=8):
        by_rule = [drafted_text(rule, table, draft_rows, uniform, num_drafts=1) for rule in RULES]
        assert by_rule[0] == by_rule[1]


def test_a_block_asks_for_no_row_after_an_impossible_draft() -> None:
    rows = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    block = point_mass_block(torch.tensor([[0, 1, 1]]), torch.float64)
    num_accepted, left = accept_one_by_block(block, rows.__getitem__, torch.full((3,), 1e-9, dtype=torch.float64))
    assert (num_accepted, left.tolist()) == (0, [0.0, 1.0])


def test_a_block_without_drafts_leaves_the_target_alone() -> None:
    nothing = point_mass_block(torch.zeros(1, 0, dtype=torch.int64), torch.float64)
    num_accepted, left = accept_one_by_block(nothing, lambda slot: TARGET, torch.zeros(0, dtype=torch.float64))
    assert (num_accepted, left.tolist()) == (0, TARGET.tolist())


@pytest.mark.parametrize(
    ("uniform", "num_accepted", "left"), [(0.37, 1, [0.0, 0.05, 0.25]), (0.38, 0, [0.0, 0.3, 0.0])]
)
def test_a_block_by_hand(uniform: float, num_accepted: int, left: list[float]) -> None:
    """Draft 0 has weight .3 / .6; it leaves .3 of the row after it, so it is kept with chance .3 / (.3 + .5)."""
    rows = torch.tensor([[0.3, 0.7, 0.0], [0.0, 0.3, 0.7]], dtype=torch.float64)
    candidate_probs = torch.tensor([[[0.6, 0.4, 0.0], [0.8, 0.1, 0.1]]], dtype=torch.float64)
    block = DraftBlock(torch.tensor([[0, 0]]), torch.arange(3).expand(1, 2, 3), candidate_probs)
    kept, probs = accept_one_by_block(block, rows.__getitem__, torch.tensor([uniform, 0.0], dtype=torch.float64))
    assert kept == num_accepted
    torch.testing.assert_close(probs.tolist(), left)
