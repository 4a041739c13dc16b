"""Prompts in which some rows bring their embedding, for the cases about images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outrider.core import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.state import RequestState
from outrider.models.attention import GivenRows
from outrider.models.multimodal import PromptRows, row_positions
from tests.toy import HIDDEN_SIZE

IMAGE_ID = 90


def mixed_prompt(before: Sequence[int], num_given: int, after: Sequence[int]) -> PromptRows:
    """Text, given rows, text; NaN in every row of the embedding buffer that is not given."""
    token_ids = torch.tensor([*before, *[IMAGE_ID] * num_given, *after])
    is_given = token_ids == IMAGE_ID
    noise = torch.randn(len(token_ids), HIDDEN_SIZE, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    embeddings = torch.where(is_given[:, None], noise, torch.nan)
    return PromptRows(token_ids, row_positions(len(token_ids)), GivenRows(is_given, embeddings))


def finish_rows(
    engine: Engine,
    prompt: PromptRows,
    params: SamplingParams,
    *,
    after_step: Callable[[RequestState], None] = lambda request: None,
) -> RequestState:
    """Run one request to its end; `after_step` is called from its first token on."""
    request = engine.add_rows(prompt, params)
    while engine.has_work:
        engine.step()
        if request.output_token_ids:
            after_step(request)
    return request
