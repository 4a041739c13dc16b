"""Simulated cycles mean what serving measures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outrider.training.capture import GridRunner, Taps
from outrider.training.dataset import anchor_candidates, make_blocks
from outrider.training.generate import TextKind
from outrider.training.selection import GreedyWalk, evaluate_greedy, evaluate_sampled, walk
from outrider.training.trainer import Trainer
from tests.training import tiny

NUM_POSITIONS = 20


def walked(
    matches: torch.Tensor, first: int, last: int, *, draft_length: int, repeats: Sequence[int] = ()
) -> GreedyWalk:
    inside = torch.zeros(matches.shape[:2], dtype=torch.bool)
    inside[:, list(repeats)] = True
    return walk(matches, torch.tensor([first]), torch.tensor([last]), inside, draft_length=draft_length)


def test_right_at_two_slots_and_wrong_at_the_third_is_three_tokens_a_cycle() -> None:
    """T-073 b."""
    matches = torch.tensor([True, True, False, True]).expand(1, 40, 4)
    result = walked(matches, 5, 39, draft_length=4)
    assert result.mean_acceptance_length == 3.0
    assert result.num_cycles == 10  # anchors 5, 8 .. 32; a block at 35 would end at 39
    assert walked(matches, 5, 39, draft_length=1).mean_acceptance_length == 2.0
    assert walked(matches, 5, 39, draft_length=2).mean_acceptance_length == 3.0


def test_the_next_anchor_is_the_targets_own_token() -> None:
    matches = torch.zeros(1, 12, 2, dtype=torch.bool)
    matches[0, 2] = True  # 2 accepted: on to 5
    matches[0, 5, 0] = True  # 1 accepted: on to 7
    matches[0, 3] = matches[0, 4] = matches[0, 6] = True  # never visited
    matches[0, 7, 1] = True  # wrong at slot 1: what follows does not count
    result = walked(matches, 2, 11, draft_length=2, repeats=[5])
    assert (result.num_cycles, result.num_accepted_tokens) == (4, 3)  # anchors 2, 5, 7, 8
    assert (result.num_cycles_outside_repeats, result.num_accepted_outside_repeats) == (3, 2)
    assert result.acceptance_outside_repeats == pytest.approx(1 + 2 / 3)


def test_texts_too_short_for_a_block_have_no_cycle() -> None:
    result = walked(torch.ones(1, 8, 3, dtype=torch.bool), 5, 7, draft_length=3)
    assert result.num_cycles == 0
    assert result.summary()["mean_acceptance_length"] == 1.0


@pytest.fixture
def trainer() -> Trainer:
    return tiny.trainer(tiny.recipe())


@pytest.fixture
def runner(trainer: Trainer) -> GridRunner:
    return GridRunner(trainer.target, num_sequences=8, num_positions=NUM_POSITIONS)


def test_greedy_cycles_are_those_of_drafting_one_block_at_a_time(trainer: Trainer, runner: GridRunner) -> None:
    """A text that the drafter itself continues is accepted in part; walking it block by block gives the same counts."""
    text = tiny.text(1, num_positions=NUM_POSITIONS)
    token_ids = text.token_ids.long()
    layers = trainer.recipe.drafter.target_layer_ids

    def draft(anchor: int) -> list[int]:
        logits = trainer.draft_logits(runner.taps(token_ids, layers), token_ids, torch.tensor([[anchor]]), block_size=4)
        drafted: list[int] = trainer.draft_to_target[logits[0, 0].argmax(dim=-1)].tolist()
        return drafted

    token_ids[0, 5:7] = torch.tensor(draft(4)[:2])
    token_ids[0, 8] = draft(7)[0]
    text.token_ids = token_ids.int()
    anchor, num_cycles, num_accepted = 4, 0, 0
    while anchor + 3 < NUM_POSITIONS - 1:
        wanted = token_ids[0, anchor + 1 : anchor + 4].tolist()
        count = next((i for i, pair in enumerate(zip(draft(anchor), wanted, strict=True)) if pair[0] != pair[1]), 3)
        num_cycles, num_accepted, anchor = num_cycles + 1, num_accepted + count, anchor + count + 1
    result = evaluate_greedy(trainer, runner, text)
    assert [one.draft_length for one in result] == [1, 2, 3]
    assert (result[2].num_cycles, result[2].num_accepted_tokens) == (num_cycles, num_accepted)
    assert num_accepted >= 2


def test_sampled_figures_are_the_acceptance_of_all_blocks(trainer: Trainer, runner: GridRunner) -> None:
    """Over more texts than are evaluated at a time, each anchor counts once."""
    text = tiny.text(10, kind=TextKind.SAMPLED, num_positions=NUM_POSITIONS)
    found = evaluate_sampled(trainer, runner, text)
    anchors = torch.arange(NUM_POSITIONS).expand(10, -1)
    batch = make_blocks(text, anchors, anchor_candidates(text), block_size=4)
    layers = trainer.recipe.drafter.target_layer_ids
    taps = torch.cat([runner.taps(batch.token_ids[:8], layers), runner.taps(batch.token_ids[8:], layers)])
    expected = trainer.loss(Taps(taps, trainer.recipe.drafter.target_layer_ids), batch).acceptance_by_slot
    assert found == pytest.approx(expected.tolist(), rel=1e-4)


def test_drafters_whose_anchor_predicts_are_walked_to_their_last_slot() -> None:
    """DSpark: a block of 4 slots drafts 4; a Markov bias is by the text, which is the drafts' up to the first miss."""
    trainer = tiny.trainer(tiny.dspark_recipe(drafter={"draft_vocab_size": tiny.VOCAB}))
    runner = GridRunner(trainer.target, num_sequences=8, num_positions=NUM_POSITIONS)
    walks = evaluate_greedy(trainer, runner, tiny.text(2, num_positions=NUM_POSITIONS))
    assert [each.draft_length for each in walks] == [1, 2, 3, 4]
    assert len(evaluate_sampled(trainer, runner, tiny.text(2, kind=TextKind.SAMPLED))) == 4
