"""Rows of a verify pass: each request's lie together, spare rows belong to nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.batch import Anchors, CycleBatch, pack_rows
from outrider.engine.state import RequestState
from tests.cases.constrained import fresh_constraint
from tests.toy import CPU


def make_request(seat: int, prompt: tuple[int, ...], output: list[int], draft_length: int) -> RequestState:
    return RequestState(
        index=seat,
        prompt_token_ids=prompt,
        params=SamplingParams(),
        noise_seed=100 + seat,
        draft_length=draft_length,
        num_tokens_left=50,
        stop_token_ids=frozenset(),
        decoder=None,
        seat=seat,
        output_token_ids=output,
    )


@pytest.fixture
def batch() -> CycleBatch:
    """Three requests with 2, 0 and 1 drafts in seats 2, 0 and 5."""
    requests = [
        make_request(2, (1, 2, 3), [40], 2),
        make_request(0, (1,), [41, 42], 0),
        make_request(5, (9, 9), [43, 44, 45], 1),
    ]
    return CycleBatch.of(requests, [2, 0, 1], CPU)


def test_a_batch_says_where_every_request_stands(batch: CycleBatch) -> None:
    assert batch.seats.tolist() == [2, 0, 5]
    assert batch.anchor_token_ids.tolist() == [40, 42, 45]
    assert batch.anchor_positions.tolist() == list(batch.host_positions) == [3, 2, 4]
    assert batch.draft_lengths.tolist() == list(batch.host_lengths) == [2, 0, 1]
    assert batch.noise_seeds == (102, 100, 105)


def test_the_end_of_a_prompt_is_a_batch_without_drafts() -> None:
    batch = CycleBatch.at_prompt_end(make_request(1, (7, 8, 9), [], 4), CPU)
    assert (batch.host_positions, batch.host_lengths, batch.anchor_token_ids.tolist()) == ((2,), (0,), [9])


def test_rows_are_anchor_then_drafts_request_after_request(batch: CycleBatch) -> None:
    drafts = torch.tensor([[50, 51], [60, 61], [70, 71]])
    packed = pack_rows(batch, drafts, num_rows=batch.num_rows)
    assert packed.rows.token_ids.tolist() == [40, 50, 51, 42, 45, 70]
    assert packed.rows.seats.tolist() == [2, 2, 2, 0, 5, 5]
    assert packed.rows.positions.tolist() == [3, 4, 5, 2, 4, 5]
    assert packed.owners.tolist() == [0, 0, 0, 1, 2, 2]
    assert packed.slots.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.row_index.tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 5]]


def test_spare_rows_have_no_seat(batch: CycleBatch) -> None:
    drafts = torch.tensor([[50, 51], [60, 61], [70, 71]])
    plain = pack_rows(batch, drafts, num_rows=batch.num_rows)
    padded = pack_rows(batch, drafts, num_rows=9)
    assert padded.rows.seats[6:].tolist() == [-1] * 3
    assert padded.rows.positions[6:].tolist() == [0] * 3
    assert torch.equal(padded.rows.token_ids[:6], plain.rows.token_ids)
    assert torch.equal(padded.row_index, plain.row_index)


def test_no_draft_is_one_row_each(batch: CycleBatch) -> None:
    alone = CycleBatch.at_prompt_end(make_request(1, (7, 8, 9), [], 4), CPU)
    packed = pack_rows(alone, torch.zeros(1, 0, dtype=torch.int64), num_rows=alone.num_rows)
    assert (packed.rows.token_ids.tolist(), packed.row_index.tolist()) == ([9], [[0]])


def test_drafts_that_ended_early_are_cut(batch: CycleBatch) -> None:
    shorter = batch.cut((1, 4, 0))
    assert shorter.draft_lengths.tolist() == list(shorter.host_lengths) == [1, 0, 0]
    assert batch.host_lengths == (2, 0, 1)
    packed = pack_rows(shorter, torch.tensor([[50, 51], [0, 0], [52, 0]]), num_rows=shorter.num_rows)
    assert packed.rows.token_ids.tolist() == [40, 50, 42, 45]


def test_grammars_want_logits(batch: CycleBatch) -> None:
    assert not batch.has_constraints
    assert not batch.needs_logits
    constraint = fresh_constraint([])
    constrained = replace(batch, constraints=(None, constraint, None))
    assert constrained.has_constraints
    assert constrained.needs_logits
    assert [constrained.constraint(request) for request in range(3)] == [None, constraint, None]


def test_a_spare_request_has_no_row_wherever_it_stands() -> None:
    anchors = Anchors(
        seats=torch.tensor([-1, 4, -1, 2, -1]),
        anchor_token_ids=torch.tensor([0, 40, 0, 41, 0]),
        anchor_positions=torch.tensor([0, 7, 0, 9, 0]),
        draft_lengths=torch.tensor([-1, 1, -1, 0, -1]),
    )
    packed = pack_rows(anchors, torch.tensor([[0], [50], [0], [60], [0]]), num_rows=4)
    assert packed.rows.token_ids[:3].tolist() == [40, 50, 41]
    assert packed.rows.seats.tolist() == [4, 4, 2, -1]
    assert packed.rows.positions.tolist() == [7, 8, 9, 0]
    assert packed.owners[:3].tolist() == [1, 1, 3]
    assert packed.row_index[[1, 3]].tolist() == [[0, 1], [2, 2]]
    assert int(packed.row_index.max()) < 4  # there is something to read, if nothing to mean
