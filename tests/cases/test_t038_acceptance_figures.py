"""T-038: accepted are drafts kept, proposed are drafts verified; per request and for all together, the figures agree.

Seen red: record_cycle counting accepted + 1.
"""

from __future__ import annotations

import pytest

from outrider import metrics
from outrider.core import SamplingParams
from tests.local_serving import Listener, serving
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import reference_greedy, toy_target

TARGET = toy_target()
PROMPT = [5, 17, 80]
ANSWER = reference_greedy(TARGET, PROMPT, 11)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            (3, 0, 2, 1),
            {"rounds": 4, "proposed": 10, "accepted": 6, "by_position": (3, 2, 1), "rate": 0.6, "mean": 2.5},
        ),
        (
            (0,),
            {
                "rounds": 10 - 1,
                "proposed": 3 * 7 + 2 + 1,
                "accepted": 0,
                "by_position": (0, 0, 0),
                "rate": 0.0,
                "mean": 1.0,
            },
        ),
    ],
    ids=["mixed", "none"],
)
def test_t038_figures_of_a_script(script: tuple[int, ...], expected: dict[str, object]) -> None:
    proposer = ScriptedProposer([PROMPT + ANSWER], script=script, max_draft_length=3)
    with serving(make_test_engine(TARGET, proposer, max_seats=1)) as backend:
        listener = Listener()
        backend.submit(PROMPT, SamplingParams(max_tokens=11), listener)
        summary = listener.wait().summary
    assert listener.token_ids == ANSWER
    assert summary is not None
    for stats in (summary.acceptance, backend.gauges().acceptance):
        num_cycles = stats.num_cycles
        by_position = metrics.acceptance_by_position(stats, num_speculative_tokens=3)
        counts = tuple(round(share * num_cycles) for share in by_position)
        assert expected == {
            "rounds": num_cycles,
            "proposed": stats.num_draft_tokens,
            "accepted": stats.num_accepted_tokens,
            "by_position": counts,
            "rate": metrics.acceptance_rate(stats),
            "mean": metrics.mean_acceptance_length(stats),
        }
        assert sum(counts) == stats.num_accepted_tokens
    assert sum(chunk.num_draft_tokens for chunk in listener.chunks) == expected["proposed"]
