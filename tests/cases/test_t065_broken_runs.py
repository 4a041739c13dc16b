"""T-065: a fast number from a broken or mislabelled run is flagged, and no acceptance raises its rank.

Seen red: loops unflagged, faults that leave the rank alone, echoes not compared.
"""

from __future__ import annotations

from typing import Any

import pytest

from outrider.benchmarking.answer_quality import quality_flag, setting_faults
from outrider.benchmarking.compare import run_arms
from outrider.benchmarking.comparison import best_arm, compare_arms
from tests.benchmarking.planted import TEXT, PlantedArm

PHRASE = "all work and no play makes Jack dull. "
PROMPTS = [f"prompt {index}" for index in range(12)]


@pytest.mark.parametrize(("text", "flag"), [(TEXT, None), ("and " * 200, "loop"), (PHRASE * 25, "loop"), ("", "empty")])
def test_t065_flags(text: str, flag: str | None) -> None:
    assert quality_flag(text) == flag


@pytest.mark.parametrize(
    ("asked", "echoed"), [({"temperature": 0.7}, {"temperature": 0.0}), ({"drafting": True}, {"drafting": False})]
)
def test_t065_an_echo_that_is_not_what_was_asked(asked: dict[str, Any], echoed: dict[str, Any]) -> None:
    (fault,) = setting_faults(asked, echoed)
    assert next(iter(asked)) in fault


def test_t065_a_loop_at_high_acceptance_is_not_the_winner() -> None:
    def loops(prompt: str) -> str:
        return "and " * 200 if prompt in PROMPTS[:8] else f"{prompt}: {TEXT}"

    clock = [0]
    high = {"num_spec_steps": 1, "num_accepted_draft_tokens": 15, "num_draft_tokens": 15}
    low = {"num_spec_steps": 5, "num_accepted_draft_tokens": 5, "num_draft_tokens": 75}
    arms = [
        PlantedArm("plain", lambda _: 0.1, clock),
        PlantedArm("sound", lambda _: 0.08, clock, {"acceptance": low}, {"drafting": True}),
        PlantedArm("loops", lambda _: 0.01, clock, {"acceptance": high, "text": loops}, {"drafting": True}),
        PlantedArm("silent", lambda _: 0.02, clock, {}, {"drafting": True}),
    ]
    rows = run_arms(arms, PROMPTS, num_rounds=2)
    summaries = {each["arm"]: each for each in compare_arms(rows, arms, is_greedy=True)}
    verdicts = {name: each["verdict"] for name, each in summaries.items()}
    assert verdicts == {"sound": "faster", "loops": "invalid", "silent": "invalid"}
    assert summaries["loops"]["mean_acceptance_length"] > summaries["sound"]["mean_acceptance_length"]
    assert best_arm(list(summaries.values())) == "sound"
    assert {row.flag for row in rows if row.arm == "loops" and row.prompt_index < 8} == {"loop"}
