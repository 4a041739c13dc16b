"""T-005: row i of a verify pass is penalised for the drafts before it too, as plain decoding would penalise it.

Seen red: another request's adjustments or history; history frozen for a block; drafted rows left as they are; draft i
itself in the history of row i.
"""

from __future__ import annotations

import pytest
import torch

from outrider.core import SamplingParams
from tests.scripted import ScriptedProposer, TableTarget, make_test_engine, run_requests

LOGITS = torch.tensor([3.0, 2.5, 0.0], dtype=torch.float64)
RIGHT = [0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
FREQUENCY = SamplingParams(frequency_penalty=0.4, max_tokens=12)
SCRIPTS = {"all-full": (), "all-0": (0,), "mixed": (3, 0, 2, 4, 1)}


def make_target() -> TableTarget:
    return TableTarget(LOGITS.expand(3, -1))


def drafting(texts: list[list[int]], script: tuple[int, ...]) -> ScriptedProposer:
    return ScriptedProposer(texts, script=script, vocab_size=3, tap_layers=())


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_t005_frequency_penalty_counts_drafts_before_the_row(script: tuple[int, ...]) -> None:
    engine = make_test_engine(make_target(), drafting([[2, *RIGHT]], script))
    assert run_requests(engine, ([2], FREQUENCY)) == [RIGHT]
    assert run_requests(make_test_engine(make_target()), ([2], FREQUENCY)) == [RIGHT]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.8, max_tokens=12),
        SamplingParams(repetition_penalty=1.7, max_tokens=12),
        SamplingParams(frequency_penalty=0.4, presence_penalty=0.3, repetition_penalty=1.3, max_tokens=12),
        SamplingParams(frequency_penalty=0.4, temperature=1.0, seed=5, max_tokens=12),
    ],
    ids=["presence", "repetition", "all", "seeded"],
)
def test_t005_others_equal_plain_decoding_also_beside_other_requests(
    params: SamplingParams, script: tuple[int, ...]
) -> None:
    (plain,) = run_requests(make_test_engine(make_target()), ([2], params))
    assert len(set(plain)) > 1
    wanted = {params: plain, SamplingParams(max_tokens=12): [0] * 12, FREQUENCY: RIGHT}
    for order in (tuple(wanted), tuple(reversed(wanted))):
        texts = [wanted[each] for each in order]
        engine = make_test_engine(make_target(), drafting([[2, *text] for text in texts], script))
        assert run_requests(engine, *(([2], each) for each in order)) == texts
