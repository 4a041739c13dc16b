"""T-033: one raw log-probability for each emitted token, from the target at that place; none of a rejected draft.

Seen red: rows of a block shifted by one; the adjusted rows reported; entries of a whole block after a cut.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import SamplingParams
from outrider.models.gemma import GemmaTarget
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import dense_logits, toy_target

PROMPT = [5, 17, 80]
GREEDY = SamplingParams(max_tokens=12, logprobs=3)
SEEDED = replace(GREEDY, temperature=1.0, seed=2, repetition_penalty=1.2, logit_bias={4: 1.0})


@pytest.fixture(scope="module")
def target() -> GemmaTarget:
    return toy_target()


@pytest.mark.parametrize("params", [GREEDY, SEEDED, replace(SEEDED, seed=None)], ids=["greedy", "seeded", "rejection"])
@pytest.mark.parametrize("script", [(), (0,), (2, 0, 4)], ids=["all-full", "all-0", "2,0,4"])
def test_t033_entries_are_the_targets_own(target: GemmaTarget, script: tuple[int, ...], params: SamplingParams) -> None:
    engine = make_test_engine(target)
    plain = engine.add(PROMPT, params)
    while engine.has_work:
        engine.step()
    engine = make_test_engine(target, ScriptedProposer([PROMPT + plain.output_token_ids], script=script))
    request = engine.add(PROMPT, replace(params, stop_token_ids=(plain.output_token_ids[9],)))
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    entries = [entry for chunk in chunks for entry in chunk.logprobs]
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert entries == request.logprobs
    assert [entry.token_id for entry in entries] == request.output_token_ids
    for i, entry in enumerate(entries):
        expected = dense_logits(target, PROMPT + request.output_token_ids[:i])[-1].log_softmax(dim=-1)
        assert entry.raw_logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-8)
        top = expected.topk(3)
        assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
        torch.testing.assert_close([value for _, value in entry.top], top.values.tolist(), rtol=0, atol=1e-8)
    if params.is_greedy or params.seed is not None:
        assert [entry.token_id for entry in entries] == plain.output_token_ids[: len(entries)]
