"""The order of requests, and what is kept of them. Seen red: rounds all in one order, warm-up rows kept."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from outrider.benchmarking import compare
from outrider.benchmarking.compare import Row, num_turns, plan_turns, run_arms
from tests.benchmarking.planted import PlantedArm, sample


@pytest.mark.parametrize("num_arms", [2, 3])
def test_every_two_rounds_are_mirrored_for_every_prompt(num_arms: int) -> None:
    turns = plan_turns(num_arms=num_arms, num_prompts=5, num_rounds=4)
    assert len(turns) == num_arms * 5 * 4
    orders = {
        key: [turn.arm_index for turn in turns if (turn.round_index, turn.prompt_index) == key]
        for key in {(turn.round_index, turn.prompt_index) for turn in turns}
    }
    for (round_index, prompt_index), order in orders.items():
        assert sorted(order) == list(range(num_arms))
        if round_index % 2 == 0:
            assert orders[round_index + 1, prompt_index] == order[::-1]
    assert len({tuple(order) for order in orders.values()}) > 1


def test_a_steady_drift_takes_the_same_from_every_arm() -> None:
    places: Counter[tuple[int, int]] = Counter()
    for place, turn in enumerate(plan_turns(num_arms=3, num_prompts=7, num_rounds=6)):
        places[turn.prompt_index, turn.arm_index] += place
    for prompt_index in range(7):
        assert len({places[prompt_index, arm] for arm in range(3)}) == 1


def test_the_first_of_a_pair_is_drawn_and_can_be_drawn_again() -> None:
    firsts = [turn.arm_index for turn in plan_turns(num_arms=2, num_prompts=200, num_rounds=1)[::2]]
    assert 60 < sum(firsts) < 140
    assert plan_turns(num_arms=2, num_prompts=9, num_rounds=4) == plan_turns(num_arms=2, num_prompts=9, num_rounds=4)
    assert plan_turns(num_arms=2, num_prompts=9, num_rounds=4) != plan_turns(
        num_arms=2, num_prompts=9, num_rounds=4, seed=1
    )


def test_a_cold_start_is_discarded_and_everything_else_kept() -> None:
    clock = [0]
    arms = [PlantedArm(name, lambda n: 9.0 if n <= 6 else 0.1, clock) for name in ("a", "b")]
    heard: list[str] = []
    rows = run_arms(arms, ["x", "y", "z"], num_rounds=4, num_warmup_rounds=1, on_turn=heard.append)
    assert len(heard) == num_turns(num_arms=2, num_prompts=3, num_rounds=4, num_warmup_rounds=1) == clock[0] == 30
    assert heard[0].startswith("warm-up")
    assert len(rows) == 24
    assert {(row.arm, row.round_index, row.prompt_index) for row in rows} == {
        (arm, round_index, prompt_index) for arm in "ab" for round_index in range(4) for prompt_index in range(3)
    }
    assert all(compare.decode_pace_s(row.sample) == pytest.approx(0.1) for row in rows)


def test_the_pace_is_that_of_the_tokens_after_the_first_chunk() -> None:
    """Events at 0.1, 0.2, 0.3, 0.4 s with 4 tokens each: 12 tokens in 0.3 s, not 15."""
    known = sample(
        ttft_s=0.1, e2e_s=0.4, num_output_tokens=16, num_chunks=4, chunk_gaps_s=(0.1,) * 3, num_first_tokens=4
    )
    assert compare.decode_pace_s(known) == pytest.approx(1 / 40)
    assert compare.decode_pace_s(sample()) == pytest.approx(0.1)
    assert compare.decode_pace_s(sample(num_output_tokens=None)) is None


def test_rows_say_what_was_wrong_and_fit_into_a_record() -> None:
    arms = [
        PlantedArm("a", lambda _: 0.1, [0], {"text": ""}),
        PlantedArm("b", lambda _: 0.1, [0], {"error": "HTTP 500"}),
    ]
    rows = run_arms(arms, ["x"], num_rounds=1, num_warmup_rounds=0)
    assert {row.arm: row.flag for row in rows} == {"a": "empty", "b": "failed"}
    row = Row(arm="a", round_index=1, prompt_index=2, sample=sample(), flag=None).as_dict()
    assert row["decode_pace_s"] == pytest.approx(0.1)
    assert json.loads(json.dumps(row))["num_output_tokens"] == 11
