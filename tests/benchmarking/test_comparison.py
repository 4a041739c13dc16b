"""What a comparison says, on arms of planted speed, drift and faults.

Seen red: the ratio upside down, prompts that loop on one side kept, faults that leave the verdict alone, a noise floor
of the wrong arm, a broken arm ranked first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from outrider.benchmarking.compare import run_arms
from outrider.benchmarking.comparison import Judging, best_arm, compare_arms
from outrider.errors import EngineFault
from tests.benchmarking.planted import PlantedArm

PROMPTS = [f"prompt {index}" for index in range(24)]
LOOP = "and so on " * 40


def paced(seconds: float, *, drift: float = 0.0, noise: float = 0.0, seed: int = 0) -> Callable[[int], float]:
    """Seconds a token of the n-th request: slower by `drift` a request, with noise that only slows."""
    random = Random(seed)
    return lambda n: seconds * (1 + drift * n) * (1 + random.gammavariate(1.5, noise / 1.5) if noise else 1.0)


def compared(*arms: PlantedArm, num_rounds: int = 4, is_greedy: bool = True, **judging: Any) -> list[dict[str, Any]]:
    rows = run_arms(arms, PROMPTS, num_rounds=num_rounds)
    summaries = compare_arms(rows, arms, is_greedy=is_greedy, judging=Judging(**judging))
    json.dumps(summaries, allow_nan=False)
    return summaries


def two(first: Callable[[int], float], second: Callable[[int], float], **fields: Any) -> list[PlantedArm]:
    clock = [0]
    return [PlantedArm("plain", first, clock), PlantedArm("fast", second, clock, fields)]


def test_a_planted_speedup_is_found_through_drift_and_noise() -> None:
    arms = two(paced(0.1, drift=0.002, noise=0.1), paced(0.1 / 1.58, drift=0.002, noise=0.1, seed=1))
    (found,) = compared(*arms, num_rounds=6)
    low, high = found["speedup_interval"]
    assert low < 1.58 < high
    assert high / low < 1.06
    assert (found["verdict"], found["arm"], found["baseline"]) == ("faster", "fast", "plain")
    assert found["identical"] is True
    assert found["p_value"] < 0.001
    assert found["tokens_per_s"] / found["baseline_tokens_per_s"] == pytest.approx(found["speedup"], rel=0.02)
    assert (found["num_prompts"], found["num_rounds"], found["num_left_out_prompts"]) == (24, 6, 0)
    assert len(found["prompt_ratios"]) == 24
    assert best_arm([found]) == "fast"


def test_drift_alone_is_no_difference_to_a_millionth() -> None:
    """Linear in the logarithm: what mirrored orders take out exactly."""
    arms = two(lambda n: 0.1 * 1.001**n, lambda n: 0.1 * 1.001**n)
    (found,) = compared(*arms, num_rounds=2)
    assert found["speedup"] == pytest.approx(1.0, abs=1e-6)


def test_an_arm_against_itself_makes_the_floor_that_claims_must_pass() -> None:
    clock = [0]
    noises = [paced(0.1, noise=0.8, seed=seed) for seed in range(2)]
    plain, again = (
        PlantedArm(name, noise, clock) for name, noise in zip(("plain", "plain again"), noises, strict=True)
    )
    other = PlantedArm("other", lambda n: 0.95 * noises[0](n), clock)
    (alone,) = compared(plain, again)
    assert alone["noise_floor"] > 0.02
    assert alone["verdict"] in ("unresolved", "equal")
    (found,) = compared(plain, other, again)
    assert found["arm"] == "other"
    assert found["noise_floor"] > 0
    assert found["verdict"] == "unresolved"
    assert found["recommended_num_prompts"] > 24
    assert "within the noise floor" in found["verdict_text"]
    (few,) = compared(plain, PlantedArm("same", paced(0.1, noise=0.8, seed=3), clock))
    assert few["noise_floor"] is None
    assert f"24; {few['recommended_num_prompts']} would do" in few["verdict_text"]


def test_the_floor_is_that_of_the_second_run() -> None:
    clock = [0]
    arms = [PlantedArm(name, paced(pace), clock) for name, pace in (("a", 0.1), ("b", 0.05), ("a again", 0.1))]
    (found,) = compared(*arms)
    assert found["noise_floor"] == pytest.approx(0.0, abs=1e-9)
    assert found["verdict"] == "faster"


def test_other_text_is_reported_and_sampled_text_not_compared() -> None:
    (found,) = compared(*two(paced(0.1), paced(0.1), text="a short answer"))
    assert (found["identical"], found["num_different_prompts"], found["num_unsteady_prompts"]) == (False, 24, 0)
    (sampled,) = compared(*two(paced(0.1), paced(0.1), text="a short answer"), is_greedy=False)
    assert sampled["identical"] is None
    counter = iter(range(10_000))
    (unsteady,) = compared(*two(paced(0.1), paced(0.1), text=lambda _: f"answer {next(counter)}"))
    assert unsteady["num_unsteady_prompts"] == 24


def test_a_prompt_that_fails_once_is_left_out_of_the_pair() -> None:
    def error(prompt: str) -> str | None:
        return "HTTP 500" if prompt == "prompt 3" else None

    (found,) = compared(*two(paced(0.1), paced(0.05), error=error))
    assert (found["num_prompts"], found["num_left_out_prompts"], found["faults"]) == (23, 1, [])
    assert 3 not in found["prompt_indices"]
    with pytest.raises(EngineFault, match=r"0 prompts in common.*HTTP 500"):
        compared(*two(paced(0.1), paced(0.05), error="HTTP 500"))
    with pytest.raises(EngineFault, match="no time after its first token"):
        compared(*two(paced(0.1), paced(0.05), num_output_tokens=None))


def test_loops_on_one_side_alone_are_a_fault_and_on_both_are_told() -> None:
    def text(prompt: str) -> str:
        return LOOP if int(prompt.split()[1]) < 8 else f"{prompt} and its answer"

    (broken,) = compared(*two(paced(0.1), paced(0.01), text=text))
    assert broken["verdict"] == "invalid"
    assert "8 of 24 prompts fail, loop or get no answer" in broken["verdict_text"]
    assert best_arm([broken]) is None
    clock = [0]
    plain = PlantedArm("plain", paced(0.1), clock, {"text": text})
    (lame,) = compared(plain, PlantedArm("fast", paced(0.05), clock))
    assert (lame["verdict"], lame["num_prompts"]) == ("invalid", 16)  # what is left of a broken baseline proves little
    assert "no answer in the baseline and not here" in lame["verdict_text"]
    (one,) = compared(*two(paced(0.1), paced(0.05), text=lambda prompt: LOOP if prompt == "prompt 3" else prompt))
    assert (one["num_prompts"], one["num_looping_prompts"], one["verdict"]) == (23, 0, "faster")
    clock = [0]
    both = [PlantedArm(name, paced(0.1), clock, {"text": text}) for name in ("plain", "fast")]
    both[1].pace_s = lambda _: 0.05
    (found,) = compared(*both)
    assert (found["verdict"], found["num_looping_prompts"], found["num_prompts"]) == ("faster", 8, 24)
    assert found["speedup_outside_loops"] == pytest.approx(2.0)


def test_settings_and_lengths_that_are_not_those_asked_for_invalidate() -> None:
    arms = two(paced(0.1), paced(0.05))
    arms[1].asked = {"drafting": True}
    (silent,) = compared(*arms)
    assert silent["faults"] == ["fast: drafting was asked to be True, but the server says False"]
    assert silent["verdict"] == "invalid"
    (other,) = compared(*two(paced(0.1), paced(0.05), num_prompt_tokens=9))
    assert "24 prompts have another number of tokens" in other["verdict_text"]


def test_acceptance_is_pooled_over_answers() -> None:
    def acceptance(prompt: str) -> dict[str, int]:
        num_cycles = 1 + int(prompt.split()[1])
        return {"num_spec_steps": num_cycles, "num_accepted_draft_tokens": 2, "num_draft_tokens": 3 * num_cycles}

    (found,) = compared(*two(paced(0.1), paced(0.05), acceptance=acceptance))
    assert found["mean_acceptance_length"] == pytest.approx(1 + 48 / 300)


def test_the_fastest_sound_arm_is_the_best() -> None:
    clock = [0]
    arms = [PlantedArm(name, paced(pace), clock) for name, pace in (("a", 0.1), ("b", 0.06), ("c", 0.05), ("d", 0.01))]
    arms[3].asked = {"drafting": True}
    summaries = compared(*arms)
    assert [each["arm"] for each in summaries] == ["b", "c", "d"]
    assert best_arm(summaries) == "c"
    slower = [PlantedArm(name, paced(pace), clock) for name, pace in (("a", 0.1), ("b", 0.2))]
    assert best_arm(compared(*slower)) is None
