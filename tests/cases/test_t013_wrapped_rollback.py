"""T-013: rejections leave no trace in any layer's visible keys and values, also where a window's ring has wrapped.

Seen red: num_cache_slots with the window alone; a block of more rows than the ring has slack (now refused).
"""

from __future__ import annotations

import pytest
import torch

from outrider.core import SamplingParams
from outrider.errors import ConfigError
from tests.cases.common import fresh_caches, text_rows
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import WINDOW, reference_greedy, toy_target

PROMPT = [5, 17, 80, 3, 44]
NUM_TOKENS = 40


def test_t013_visible_keys_are_those_of_the_text() -> None:
    target = toy_target()
    text = PROMPT + reference_greedy(target, PROMPT, NUM_TOKENS)
    recomputed = fresh_caches(target.config.layers, context_length=len(text), max_rows=len(text))
    target.forward(text_rows(text), recomputed)
    engine = make_test_engine(target, ScriptedProposer([text], script=(0, 0, 4, 1, 0, 2)), max_seats=1, prefill_rows=5)
    request = engine.add(PROMPT, SamplingParams(max_tokens=NUM_TOKENS))
    num_wrapped = 0
    while engine.has_work:
        engine.step()
        end = request.anchor_position
        for spec, cache, fresh in zip(target.config.layers, engine.caches, recomputed, strict=True):
            start = 0 if spec.window is None else max(0, end - spec.window + 1)
            positions = torch.arange(start, end)
            slots = positions % cache.keys.shape[1]
            num_wrapped += end > cache.keys.shape[1]
            for found, wanted in zip(cache[:2], fresh[:2], strict=True):
                torch.testing.assert_close(found[0, slots], wanted[0, positions], rtol=0, atol=1e-10)
    assert PROMPT + request.output_token_ids == text
    assert num_wrapped > 20
    assert {cache.keys.shape[1] for cache in engine.caches} == {WINDOW + 5, 128}


@pytest.mark.parametrize("prefill_rows", [1, 4])
def test_t013_too_little_slack_is_refused(prefill_rows: int) -> None:
    with pytest.raises(ConfigError, match=f"prefill_rows={prefill_rows}.*5 rows"):
        make_test_engine(toy_target(), ScriptedProposer([[]]), prefill_rows=prefill_rows)
