"""Chunk borders lie at fixed positions; rows of a resumed text go on where its prompt ends."""

from __future__ import annotations

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.prefill import num_chunk_rows, prompt_rows
from outrider.engine.state import RequestState


def make_request(num_prompt_tokens: int, output: list[int], num_computed_tokens: int) -> RequestState:
    return RequestState(
        index=0,
        prompt_token_ids=tuple(range(10, 10 + num_prompt_tokens)),
        params=SamplingParams(),
        noise_seed=0,
        draft_length=0,
        num_tokens_left=8,
        stop_token_ids=frozenset(),
        decoder=None,
        seat=3,
        output_token_ids=output,
        num_computed_tokens=num_computed_tokens,
    )


@pytest.mark.parametrize(("start", "expected"), [(0, 8), (3, 5), (8, 8), (16, 4), (19, 1)])
def test_a_chunk_ends_at_a_border_or_with_the_text(start: int, expected: int) -> None:
    assert num_chunk_rows(make_request(20, [], start), 8) == expected


def test_rows_of_a_text_begun() -> None:
    rows = prompt_rows(make_request(4, [70, 71, 72], 2), 4, num_spare=2, device=torch.device("cpu"))
    assert rows.token_ids.tolist() == [12, 13, 70, 71, 0, 0]
    assert rows.positions.tolist() == [2, 3, 4, 5, 0, 0]
    assert rows.seats.tolist() == [3, 3, 3, 3, -1, -1]
