"""T-045: draft blocks of different widths in one call of the drafter: each request proposes as it would alone.

Seen red: Sight.spans ignoring widths, so that slots of a narrow block saw the filler after them.
"""

from __future__ import annotations

import random

import pytest
import torch

from outrider.core import SamplingParams
from outrider.models.attention import LayerCaches, Rows
from tests.cases.common import text_taps, toy_proposer
from tests.scripted import make_test_engine
from tests.toy import TAP_LAYERS, block_logits, toy_drafter, toy_target

TARGET = toy_target()
TEXTS = [[(7 * i + 5 * n) % 95 for i in range(3 + n)] for n in range(16)]
TAPS = [text_taps(TARGET, text, TAP_LAYERS) for text in TEXTS]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("num_rows", [1, 4, 8, 16])
def test_t045_proposals_are_those_of_a_call_alone(num_rows: int, window: int | None) -> None:
    proposer = toy_proposer(toy_drafter(TARGET, window=window), num_seats=16)
    drafter, caches = proposer.drafter, LayerCaches(proposer.caches)
    for seat, (text, taps) in enumerate(zip(TEXTS, TAPS, strict=True)):
        rows = Rows(torch.tensor(text), torch.full((len(text),), seat), torch.arange(len(text)))
        proposer.commit(taps, rows.seats, rows.positions)
    widths = [random.Random(num_rows).randint(1, 4) for _ in range(num_rows)]
    widths[0] = 4 if num_rows > 1 else widths[0]
    widths[-1] = 1 if num_rows > 1 else widths[-1]
    anchors = torch.tensor([seat + 20 for seat in range(num_rows)])
    starts = torch.tensor([len(text) for text in TEXTS[:num_rows]])
    together = drafter.block(
        anchors, torch.arange(num_rows), starts, num_drafts=max(widths), draft_lengths=torch.tensor(widths)
    )
    logits = block_logits(drafter, together, caches)
    for seat, width in enumerate(widths):
        alone = drafter.block(anchors[seat, None], torch.tensor([seat]), starts[seat, None], num_drafts=width)
        expected = block_logits(drafter, alone, caches)[0]
        torch.testing.assert_close(logits[seat, :width], expected, rtol=0, atol=1e-9)


def test_t045_acceptance_is_independent_of_batch_size() -> None:
    def histograms(chosen: range) -> list[dict[int, int]]:
        engine = make_test_engine(TARGET, toy_proposer(toy_drafter(TARGET), num_seats=16), max_seats=16, row_budget=80)
        params = [SamplingParams(max_tokens=8, num_speculative_tokens=1 + n % 4) for n in chosen]
        requests = [engine.add(TEXTS[n], each) for n, each in zip(chosen, params, strict=True)]
        while engine.has_work:
            engine.step()
        return [request.acceptance.accepted_histogram for request in requests]

    together = histograms(range(16))
    for n in (0, 3, 6, 13):
        assert [together[n]] == histograms(range(n, n + 1))
