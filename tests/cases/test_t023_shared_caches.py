"""T-023: a layer that reads another's keys and values owns no cache and never writes; without a donor it is refused.

Rollback trims nothing: a rejected row is overwritten by the row that takes its position, so writes are all there is to
count. Seen red: sharing layers writing too; a cache for every layer; num_kv_shared_layers allowed to be all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core import SamplingParams
from outrider.errors import WeightsError
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.reference import TorchKernels
from outrider.models.gemma import GemmaTarget
from outrider.models.gemma4_config import gemma4_config
from outrider.weights.fields import Fields
from tests.models.test_gemma4_config import DENSE
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import CPU, WINDOW, reference_greedy, toy_checkpoint, toy_target_config

SOURCES = (None, None, None, None, 2, 3)  # the last sliding layer reads layer 2, the last full one layer 3
PROMPT, NUM_TOKENS = [5, 17, 80, 3, 44, 9, 61, 2, 33], 24
CONTEXT_LENGTH = 64


class CountingKernels(TorchKernels):
    """Counts writes by the address of a cache's keys."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.num_writes: Counter[int] = Counter()

    def write_cache(self, cache: LayerCache, *rows: Any) -> None:
        self.num_writes[cache.keys.data_ptr()] += 1
        super().write_cache(cache, *rows)


def sharing_target(kernels: TorchKernels) -> GemmaTarget:
    """F1 whose last two layers have no keys and values of their own."""
    config = toy_target_config()
    layers = tuple(replace(spec, cache_source=source) for spec, source in zip(config.layers, SOURCES, strict=True))
    config = replace(config, layers=layers)
    place = {"dtype": torch.float64, "device": CPU, "context_length": CONTEXT_LENGTH}
    return GemmaTarget(config, toy_checkpoint(config), kernels=kernels, **place)  # type: ignore[arg-type]


def test_t023_each_cache_is_written_once_a_pass_by_its_owner() -> None:
    kernels = CountingKernels()
    target = sharing_target(kernels)
    expected = reference_greedy(target, PROMPT, NUM_TOKENS)
    proposer = ScriptedProposer([PROMPT + expected], script=(2, 0, 4, 1))
    engine = make_test_engine(target, proposer, max_seats=1, context_length=CONTEXT_LENGTH, prefill_rows=5)
    assert len(PROMPT) + NUM_TOKENS > WINDOW + 5  # the sliding rings wrap
    request = engine.add(PROMPT, SamplingParams(max_tokens=NUM_TOKENS))
    owned = {cache.keys.data_ptr() for cache in engine.caches}
    while engine.has_work:
        kernels.num_writes.clear()
        engine.step()  # one pass: a piece of the prompt, then a cycle each
        assert kernels.num_writes == dict.fromkeys(owned, 1)
    assert request.output_token_ids == expected
    assert 0 < request.acceptance.num_accepted_tokens < request.acceptance.num_draft_tokens


def test_t023_memory_is_that_of_four_caches() -> None:
    target = sharing_target(CountingKernels())
    engine = make_test_engine(target, max_seats=1, context_length=CONTEXT_LENGTH, prefill_rows=5)
    held = [each.untyped_storage() for cache in engine.caches for each in cache[:2]]
    stored = {storage.data_ptr(): storage.nbytes() for storage in held}
    assert len(engine.caches) == 6
    assert len(stored) == 2 * 4  # keys and values
    sliding, full = (WINDOW + 5) * 2 * 8, CONTEXT_LENGTH * 1 * 24
    assert sum(stored.values()) == 2 * 8 * (3 * sliding + full)


@pytest.mark.parametrize(
    ("num_shared", "message"),
    [
        (3, "num_kv_shared_layers=3; expected .* from 0 to 2"),
        (1, "leaves no full_attention layer to read"),
    ],
    ids=["every layer", "the only full layer"],
)
def test_t023_layers_without_a_donor_are_refused(num_shared: int, message: str) -> None:
    fields = Fields({**DENSE, "num_kv_shared_layers": num_shared}, source="a-target")
    with pytest.raises(WeightsError, match=message):
        gemma4_config(fields, norm_offset=0.0)
