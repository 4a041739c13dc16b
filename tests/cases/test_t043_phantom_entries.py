"""T-043: what lies beyond a row's own length, in its pages or in nobody's, takes no part in attention.

Seen red: a mask that lets older slots in; attention reading a missing page as page 0 (tests/kernels has C's).
"""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.reference import TorchKernels
from tests.cases.paged import PagedModels
from tests.toy import reference_greedy

PROMPTS = ([5, 17, 80, 3, 44], [9, 61, 2])
RIGHT = ((4, 0), (1, 3))  # drafts of two requests that are right in round 1 and 2


def test_t043_two_phantom_keys_would_thin_out_attention() -> None:
    """By hand: scores (1, 0) and values (1, -1) give 0.462; two zero keys more would give 0.300."""
    keys = torch.tensor([1.0, 0.0, 0.0, 0.0]).double().view(1, 4, 1, 1)
    values = torch.tensor([1.0, -1.0, 0.0, 0.0]).double().view(1, 4, 1, 1)
    cache = LayerCache(keys, values, torch.tensor([[0, -1]], dtype=torch.int32))
    queries, kernels = torch.ones(1, 1, 1).double(), TorchKernels(torch.float64)
    for num_visible, expected in ((2, 0.462), (4, 0.300)):
        spans = torch.tensor([[0, 0, num_visible, 0, 0]], dtype=torch.int32)
        assert float(kernels.attention(queries, cache, spans, scale=1.0)) == pytest.approx(expected, abs=1e-3)


def answers(filling: float, seats: tuple[int, ...]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Texts and draft logits after two rounds of ragged acceptance, for one request or both in one batch."""
    models = PagedModels(filling=filling)
    requests = [models.start(seat, PROMPTS[seat]) for seat in seats]
    texts = [[*PROMPTS[seat], *reference_greedy(models.target, PROMPTS[seat], 12)] for seat in seats]
    for round_index in range(2):
        drafts = []
        for request, text in zip(requests, texts, strict=True):
            right, num_known = RIGHT[request.seat][round_index], len(request.token_ids)
            coming = text[num_known : num_known + 4]
            drafts.append([*coming[:right], *[(token + 1) % 96 for token in coming[right:]]])
        models.cycle(requests, drafts)
    assert [request.accepted for request in requests] == [list(RIGHT[seat]) for seat in seats]
    for request, text in zip(requests, texts, strict=True):
        assert request.token_ids == text[: len(request.token_ids)]
    return [request.token_ids for request in requests], [models.draft_logits(request) for request in requests]


@pytest.mark.parametrize("filling", [0.0, 1e6, torch.nan])
def test_t043_whatever_unused_slots_hold(filling: float) -> None:
    token_ids, logits = answers(filling, (0, 1))
    for seat in (0, 1):
        solo_ids, solo_logits = answers(0.0, (seat,))
        assert token_ids[seat] == solo_ids[0]
        torch.testing.assert_close(logits[seat], solo_logits[0], rtol=0, atol=1e-10)
