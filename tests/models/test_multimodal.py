"""Which prompts of given rows and which placeholders are refused, and how the message helps.

Seen red: positions unchecked; every placeholder let through; given placeholders refused too.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.models.attention import GivenRows
from outrider.models.config import Placeholder
from outrider.models.multimodal import PromptRows, refuse_placeholders, row_positions

IMAGE, AUDIO = Placeholder(text="<|image|>", token_id=90), Placeholder(text="<|audio|>", token_id=91)


def prompt_rows(positions: Tensor, *, num_flags: int = 13, num_embeddings: int = 13) -> PromptRows:
    given = GivenRows(torch.zeros(num_flags, dtype=torch.bool), torch.zeros(num_embeddings, 32))
    return PromptRows(torch.arange(13), positions, given)


def test_rows_take_their_own_places() -> None:
    assert row_positions(4).tolist() == [0, 1, 2, 3]
    assert prompt_rows(row_positions(13)).positions.tolist() == list(range(13))


def test_the_map_of_a_grid_is_refused() -> None:
    """T-020's first map: four tokens, an image of two rows by three columns, and text that goes on at 7."""
    grid = torch.tensor([0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9])
    with pytest.raises(RequestError, match=r"row 5 of the prompt has position 4\..*give position 5\.$"):
        prompt_rows(grid)


@pytest.mark.parametrize(
    ("num_positions", "num_flags", "num_embeddings"), [(12, 13, 13), (13, 12, 13), (13, 13, 14)], ids=str
)
def test_parts_of_different_lengths_are_refused(num_positions: int, num_flags: int, num_embeddings: int) -> None:
    expected = f"13 token ids, but {num_positions} positions, {num_flags} flags and {num_embeddings} embeddings"
    with pytest.raises(RequestError, match=expected):
        prompt_rows(row_positions(num_positions), num_flags=num_flags, num_embeddings=num_embeddings)


def test_a_placeholder_is_refused_by_name_id_and_position() -> None:
    message = "the prompt has the placeholder <|audio|> (token id 91) at position 2, but targets read text only for now"
    with pytest.raises(RequestError, match=re.escape(f"{message}. Remove <|audio|>.")):
        refuse_placeholders([5, 90, 91], [False, True, False], [IMAGE, AUDIO])


def test_what_is_given_or_is_no_placeholder_passes() -> None:
    refuse_placeholders([5, 90, 91], [False, True, True], [IMAGE, AUDIO])
    refuse_placeholders([5, 90, 91], [False, False, False], [])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("token_ids", torch.arange(13).float()),
        ("token_ids", torch.zeros(13, 1, dtype=torch.int64)),
        ("token_ids", list(range(13))),
        ("positions", torch.zeros(13, 2, dtype=torch.int64)),
        ("is_given", torch.zeros(13, dtype=torch.int64)),
        ("embeddings", torch.zeros(13)),
        ("embeddings", torch.zeros(13, 32, dtype=torch.int64)),
    ],
)
def test_parts_of_another_kind_are_refused(name: str, part: Tensor) -> None:
    """Before a pass, which would end for every request of the batch."""
    parts = {"token_ids": torch.arange(13), "positions": row_positions(13)}
    given = {"is_given": torch.zeros(13, dtype=torch.bool), "embeddings": torch.zeros(13, 32)}
    (parts if name in parts else given)[name] = part
    with pytest.raises(RequestError, match=f"{name} of the prompt must be a tensor of"):
        PromptRows(**parts, given=GivenRows(**given))
