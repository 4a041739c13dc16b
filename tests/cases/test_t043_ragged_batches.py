"""T-043: rows of a batch that accept different numbers of drafts; what lies past a row's own length is never read."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.rejection import DraftBlock, point_mass_block
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.reference import TorchKernels
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import reference_greedy, toy_target

TARGET = toy_target()
PROMPTS = [[5, 17, 80, 3, 44], [9, 61, 2]]
NUM_TOKENS = 14
ANSWERS = [reference_greedy(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]
SCRIPTS = [(4, 0, 2), (1, 3, 4)]  # accepted by row and round


class RaggedProposer(ScriptedProposer):
    """A script of its own for each seat."""

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        rounds, seats = len(self.asked), batch.seats.tolist()
        rows = zip(seats, batch.host_positions, strict=True)
        drafts = [self._drafts(seat, at, draft_length, SCRIPTS[seat][rounds % 3]) for seat, at in rows]
        super().propose(batch, draft_length)  # notes what was asked
        return point_mass_block(torch.tensor(drafts), torch.float64)


def ragged_texts(filler: float) -> list[list[int]]:
    """Both answers, with filler in every target slot that no committed row wrote, before each step."""
    engine = make_test_engine(
        TARGET, RaggedProposer([p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)]), max_seats=2
    )
    requests = [engine.add(prompt, SamplingParams(max_tokens=NUM_TOKENS)) for prompt in PROMPTS]
    engine.step()
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            for layer, cache in zip(TARGET.config.layers, engine.caches, strict=True):
                if layer.window is None:
                    for each in (cache.keys, cache.values):
                        each[request.seat, request.anchor_position :] = filler
    assert requests[0].acceptance.accepted_histogram != requests[1].acceptance.accepted_histogram
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("filler", [0.0, 1e6, math.nan])
def test_t043_rows_are_as_alone_whatever_unused_slots_hold(filler: float) -> None:
    assert ragged_texts(filler) == ANSWERS


def test_t043_a_zero_key_past_the_end_takes_no_part() -> None:
    keys, values = torch.zeros(1, 4, 1, 1, dtype=torch.float64), torch.zeros(1, 4, 1, 1, dtype=torch.float64)
    keys[0, 0], values[0, 0], values[0, 1] = 1.0, 1.0, -1.0
    cache = LayerCache.of_seats(keys, values)
    query = torch.ones(1, 1, 1, dtype=torch.float64)
    kernels = TorchKernels(torch.float64)
    spans = [torch.tensor([[0, 0, end, 0, 0]], dtype=torch.int32) for end in (2, 4)]
    right, phantom = (float(kernels.attention(query, cache, each, scale=1.0)) for each in spans)
    assert right == pytest.approx(math.tanh(0.5))  # 0.462
    assert phantom == pytest.approx((math.e - 1) / (math.e + 3))  # 0.300: what two phantom keys would make of it
