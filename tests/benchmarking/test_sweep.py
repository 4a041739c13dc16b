"""Curves whose best draft length is planted, over HTTP; then what is made of them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from outrider.backends.planted import Pace, Planted
from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest, ServerClient
from outrider.benchmarking.counters import Counters
from outrider.benchmarking.request_sets import Item, RequestSet
from outrider.benchmarking.runner import Load, Run
from outrider.benchmarking.sweep import (
    Condition,
    Plan,
    _ratio_interval,
    item_speeds,
    run_sweep,
    summarize_sweep,
    sweep_record,
)
from outrider.errors import ConfigError, EngineFault
from tests.benchmarking.test_integrity import run as made_run
from tests.benchmarking.test_runner import Toy, toy_sample
from tests.serving import serve

SETS = [RequestSet(name, tuple(Item(prompt=f"{name} {number}") for number in range(4))) for name in ("prose", "code")]
LOAD = Load(num_requests=4, num_warmups=1, max_tokens=40)
# Fastest at n = 3 (planted: 500, 780, 516 tokens a second), and never worth it.
GOOD = Planted(acceptance_by_position=(0.9, 0.7, 0.6, 0.0, 0.0, 0.0), step_s=0.002, draft_token_s=0.0007)
BAD = replace(GOOD, acceptance_by_position=(0.1, 0.05, 0.0), step_s=0.001)


def swept(plans: Mapping[str, Planted], plan: Plan, load: Load = LOAD) -> dict[Any, list[Run]]:
    with serve(plans, sleep=Pace(), context_length=4096) as served, ServerClient(served.url) as client:
        return run_sweep(client, SETS, plan, load)


@pytest.fixture(scope="module")
def runs() -> dict[Any, list[Run]]:
    return swept(
        {"prose": BAD, "code": GOOD}, Plan(draft_lengths=(0, 3, 6), num_rounds=1), replace(LOAD, num_requests=8)
    )


def test_the_planted_best_is_found_and_losing_is_said(runs: dict[Any, list[Run]]) -> None:
    rows = summarize_sweep(runs)
    best = {row["workload"]: row["num_speculative_tokens"] for row in rows if row["is_best"]}
    assert best == {"prose": 0, "code": 3}
    assert {row["workload"]: row["drafter_loses"] for row in rows} == {"prose": True, "code": False}
    by_length = {row["num_speculative_tokens"]: row for row in rows if row["workload"] == "code"}
    planted = GOOD.tokens_per_s(0) / GOOD.tokens_per_s(3)
    assert by_length[0]["ratio_to_best"] == pytest.approx(planted, rel=0.2)
    low, high = by_length[0]["ratio_interval"]
    assert low < by_length[0]["ratio_to_best"] < high
    assert by_length[3]["ratio_interval"] is None
    assert by_length[3]["mean_acceptance_length"] == pytest.approx(3.2, abs=0.15)


def test_a_record_has_each_request_with_its_cell(runs: dict[Any, list[Run]]) -> None:
    record = sweep_record(
        runs, SETS, summarize_sweep(runs), name="s", urls=dict.fromkeys((0, 3, 6), "http://x"), model="m"
    )
    assert [arm["name"] for arm in record["arms"]] == ["n=0", "n=3", "n=6"]
    assert len(record["rows"]) == 2 * 3 * 8
    assert record["workload"]["name"] == "prose+code"
    assert {(row["workload"], row["arm"], row["round"]) for row in record["rows"]} >= {("code", "n=6", 0)}


class Listening(Toy):
    """Notes in which order cells were asked."""

    def cells(self) -> list[Any]:
        asked = [(each.extra["speculative"]["num_speculative_tokens"], each.temperature) for each in self.asked]
        return [cell for at, cell in enumerate(asked) if at % 2 == 0]


def test_rounds_go_there_and_back() -> None:
    toy, messages = Listening(), []
    plan = Plan(draft_lengths=(0, 4), temperatures=(0.0, 0.7), num_rounds=2)
    run_sweep(toy, SETS[:1], plan, replace(LOAD, num_requests=2, num_warmups=0), progress=messages.append)
    there = [(0, 0.0), (4, 0.0), (0, 0.7), (4, 0.7)]
    assert toy.cells() == [*there, *reversed(there)]
    assert len(messages) == plan.num_runs(["prose"]) == 8


def test_context_lengths_are_the_servers_own_count() -> None:
    class Counting(Toy):
        def complete(self, request: ChatRequest) -> Sample:
            return replace(super().complete(request), num_prompt_tokens=len((request.prompt or "").split()))

    plan = Plan(draft_lengths=(0, 4), context_tokens=(None, 500), num_rounds=1)
    rows = summarize_sweep(run_sweep(Counting(), SETS[:1], plan, LOAD))
    lengths = {row["context_tokens"]: row["num_prompt_tokens"] for row in rows}
    assert lengths[None] == 3  # a salt and two words
    assert 460 < lengths[500] <= 501


def test_a_server_that_does_not_listen_is_refused() -> None:
    class Deaf(ServerClient):
        def complete(self, request: ChatRequest) -> Sample:
            return super().complete(replace(request, extra={}))

    plan = Plan(draft_lengths=(0, 6), num_rounds=1)
    message = r"drafts 6\.0 tokens a cycle though requests ask for 0"
    served = serve({"": GOOD}, context_length=4096, sleep=lambda _: None)
    with served as server, Deaf(server.url) as client, pytest.raises(EngineFault, match=message):
        run_sweep(client, SETS, plan, LOAD)


def test_servers_started_with_a_length_each_are_asked_without_one() -> None:
    plan = Plan(draft_lengths=(0, 4), num_rounds=2)
    toys = {0: Toy(), 4: Toy()}
    runs = run_sweep(toys, SETS[:1], plan, replace(LOAD, num_requests=2, num_warmups=0))
    assert {length: len(each) for (_, length), each in runs.items()} == {0: 2, 4: 2}
    assert [len(toy.asked) for toy in toys.values()] == [4, 4]
    assert all("speculative" not in request.extra for toy in toys.values() for request in toy.asked)


def test_a_server_that_was_started_with_another_length_is_refused() -> None:
    plan = Plan(draft_lengths=(0, 3), num_rounds=1)
    message = r"named for draft length 0 drafts 6\.0 tokens a cycle"
    served = serve({"": GOOD}, context_length=4096, sleep=lambda _: None)
    with served as server, ServerClient(server.url) as client, pytest.raises(EngineFault, match=message):
        run_sweep({0: client, 3: client}, SETS, plan, LOAD)


def test_places_pair_and_failures_leave_their_place_out() -> None:
    fast = [toy_sample(e2e_s=1.0), toy_sample(e2e_s=2.0), toy_sample(e2e_s=4.0)]
    twice = [replace(each, e2e_s=2 * each.e2e_s) for each in fast]
    broken = [replace(fast[0], error="lost"), *fast[1:]]
    speeds = item_speeds([made_run(fast), made_run(twice)])
    assert speeds == pytest.approx({at: math.log(11 / (each.e2e_s * 2**0.5)) for at, each in enumerate(fast)})
    assert set(item_speeds([made_run(fast), made_run(broken)])) == {1, 2}
    ratio, interval = _ratio_interval(item_speeds([made_run(twice)]), item_speeds([made_run(fast)]), 2)
    assert ratio == pytest.approx(0.5)
    assert interval == pytest.approx([0.5, 0.5])


def test_intervals_cover_as_often_as_they_say() -> None:
    draw, num_covered = random.Random(1), 0
    for _ in range(1000):
        best = {at: draw.gauss(5, 1) for at in range(12)}
        other = {at: value + math.log(0.9) + draw.gauss(0, 0.1) for at, value in best.items()}
        interval = _ratio_interval(other, best, 2)[1] or [0, 0]
        num_covered += interval[0] <= 0.9 <= interval[1]
    assert 935 <= num_covered <= 965


def test_too_little_gives_no_interval() -> None:
    assert _ratio_interval({0: 1.0}, {0: 1.0}, 2) == (1.0, None)
    assert _ratio_interval({0: 1.0}, {1: 1.0}, 2) == (None, None)


def test_of_equal_lengths_none_is_called_a_loser_oftener_than_promised() -> None:
    draw, num_wrong = random.Random(2), 0
    for _ in range(400):
        lengths = [{at: 5 + draw.gauss(0, 0.05) for at in range(16)} for _ in range(4)]
        best = max(lengths, key=lambda each: sum(each.values()))
        found = [_ratio_interval(each, best, 4)[1] or [0, 2] for each in lengths if each is not best]
        num_wrong += any(high < 1 for _, high in found)
    assert num_wrong <= 28  # 5 % and a little; pair by pair it is 18 %


def rows_of(first: Run, second: Run) -> list[dict[str, Any]]:
    condition = Plan(draft_lengths=(0, 3)).conditions(["x"])[0]
    return summarize_sweep({(condition, 0): [first], (condition, 3): [second]})


def test_a_spoiled_length_is_never_the_best_and_one_request_shows_no_loser() -> None:
    slow, fast = toy_sample(e2e_s=2.0), toy_sample(e2e_s=1.0)
    drafted = Counters(num_drafts=3, num_generation_tokens=11)
    rows = rows_of(made_run([slow], counted=drafted), made_run([fast], counted=Counters(num_drafts=0)))
    assert [row["is_best"] for row in rows] == [True, False]
    assert rows[1]["faults"] == ["not_drafted"]
    assert not rows[0]["drafter_loses"]  # one request has no interval
    loops = made_run([replace(fast, text="and " * 200)], counted=drafted)
    assert [row["is_best"] for row in rows_of(made_run([slow], counted=drafted), loops)] == [True, False]


def test_faults_of_runs_are_in_the_row() -> None:
    condition = Plan(draft_lengths=(0, 1)).conditions(["x"])[0]
    reset = made_run([toy_sample()], counted=None, counter_fault="fell")
    rows = summarize_sweep({(condition, 0): [made_run([toy_sample()], counted=Counters())], (condition, 1): [reset]})
    assert [row["faults"] for row in rows] == [[], ["counter_reset"]]


@pytest.mark.parametrize("wrong", [{"draft_lengths": (3,)}, {"draft_lengths": (0, 3), "num_rounds": 0}])
def test_a_plan_that_compares_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Plan(**wrong)


def test_one_length_alone_is_the_best_of_itself() -> None:
    """As a sweep of servers leaves it whose others never answered."""
    condition = Condition(workload="w", concurrency=1, context_tokens=None, temperature=0.0)
    (row,) = summarize_sweep({(condition, 0): [made_run([toy_sample()], counted=None)]})
    assert (row["is_best"], row["ratio_to_best"], row["drafter_loses"]) == (True, 1.0, False)
