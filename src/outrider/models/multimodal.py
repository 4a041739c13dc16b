"""Prompts that are not all text: rows that bring their embedding, where they stand, and placeholders nobody can fill.

Positions follow Gemma's one-dimensional rule: the rows of an image or a sound take one position each, in order, and
text goes on after the last of them. So a row's position is its place in the prompt, cache slots follow from positions
as for text, and the answer begins at the number of rows. Other maps (a two-dimensional one, where text goes on after
the longer side of a grid) are refused.

Attention is causal over given rows as over text. Models whose config has use_bidirectional_attention="vision" were
trained with the rows of one image seeing each other in sliding layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.models.attention import GivenRows
from outrider.models.config import Placeholder


@dataclass(frozen=True)
class PromptRows:
    """A prompt of R rows, some of which are given; RequestError unless its parts fit each other and the rule above."""

    token_ids: Tensor  # int64 [R]; of a given row the id of its placeholder
    positions: Tensor  # int64 [R]
    given: GivenRows

    def __post_init__(self) -> None:
        """Refuse parts of other kinds or lengths, and positions that are not the rows' own places."""
        for name, part, dtype, num_dims in (
            ("token_ids", self.token_ids, torch.int64, 1),
            ("positions", self.positions, torch.int64, 1),
            ("is_given", self.given.is_given, torch.bool, 1),
            ("embeddings", self.given.embeddings, None, 2),
        ):
            is_right = isinstance(part, Tensor) and part.dim() == num_dims
            if not is_right or (part.dtype != dtype if dtype else not part.is_floating_point()):
                raise RequestError(
                    f"{name} of the prompt must be a tensor of {dtype or 'floating-point numbers'} with {num_dims} "
                    f"dimension{'s' * (num_dims > 1)}."
                )
        num_rows = len(self.token_ids)
        lengths = (len(self.positions), len(self.given.is_given), len(self.given.embeddings))
        if lengths != (num_rows,) * 3:
            raise RequestError(
                f"the prompt has {num_rows} token ids, but {lengths[0]} positions, {lengths[1]} flags and {lengths[2]} "
                "embeddings. Give one of each for every row."
            )
        wrong = (self.positions != row_positions(num_rows, self.positions.device)).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise RequestError(
                f"row {row} of the prompt has position {int(self.positions[row])}. Gemma counts the rows of an image "
                f"as it counts tokens: give position {row}."
            )


def row_positions(num_rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Position of every row of a prompt, int64 [R]: its place."""
    return torch.arange(num_rows, device=device)


def refuse_placeholders(
    token_ids: Sequence[int], is_given: Sequence[bool], placeholders: Sequence[Placeholder]
) -> None:
    """RequestError for the first placeholder among prompt rows that brings no embedding."""
    texts = {placeholder.token_id: placeholder.text for placeholder in placeholders}
    for position, (token_id, has_embedding) in enumerate(zip(token_ids, is_given, strict=True)):
        if token_id in texts and not has_embedding:
            text = texts[token_id]
            raise RequestError(
                f"the prompt has the placeholder {text} (token id {token_id}) at position {position}, but targets read "
                f"text only for now. Remove {text}."
            )
