"""Which drafter is better, from rows of counts: by hand, and against planted truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.benchmarking.selection import different_texts, ranking, summarize


def row(drafter: str, domain: str, prompt: int, *, accepted: int, cycles: int, **more: Any) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "domain": domain,
        "prompt_index": prompt,
        "temperature": 0.0,
        "num_cycles": cycles,
        "num_accepted_tokens": accepted,
        "offline_num_cycles": None,
        "offline_num_accepted_tokens": None,
        "output_sha256": f"{domain}{prompt}",
        **more,
    }


def cell(summary: list[dict[str, Any]], drafter: str, domain: str, temperature: float = 0.0) -> dict[str, Any]:
    (found,) = (
        each
        for each in summary
        if (each["drafter"], each["domain"], each["temperature"]) == (drafter, domain, temperature)
    )
    return found


def test_lengths_are_ratios_of_sums_and_differences_are_of_shared_prompts() -> None:
    rows = [
        row("old", "code", 0, accepted=10, cycles=10),
        row("old", "code", 1, accepted=0, cycles=30),
        row("old", "prose", 0, accepted=5, cycles=10),
        row("new", "code", 0, accepted=20, cycles=10),
        row("new", "code", 1, accepted=15, cycles=30),
        row("new", "prose", 0, accepted=0, cycles=0),  # one token was all: no cycle
    ]
    found = summarize(rows, baseline="old")
    assert cell(found, "old", "code")["mean_acceptance_length"] == 1 + 10 / 40
    assert cell(found, "new", "code")["mean_acceptance_length"] == 1 + 35 / 40
    assert cell(found, "new", "code")["difference"] == pytest.approx(25 / 40)
    assert cell(found, "new", "all")["difference"] == pytest.approx(25 / 40)  # prose is not paired
    assert cell(found, "old", "all")["mean_acceptance_length"] == 1 + 15 / 50
    assert cell(found, "new", "prose")["mean_acceptance_length"] is None
    assert cell(found, "new", "prose")["difference"] is None
    assert cell(found, "old", "code")["difference"] is cell(found, "old", "code")["verdict"] is None
    assert cell(found, "new", "code")["verdict"] == "too few prompts"
    assert cell(found, "new", "code")["num_prompts"] == 2
    assert [each["domain"] for each in found] == ["all", "all", "code", "code", "prose", "prose"]
    assert [each["drafter"] for each in found[:2]] == ["new", "old"]


def test_rounds_of_a_prompt_are_one_unit() -> None:
    rows = [
        row(name, "code", prompt, accepted=accepted + extra, cycles=10, temperature=1.0, round_index=round_index)
        for name, extra in (("old", 0), ("new", 5))
        for prompt, accepted in enumerate((3, 6, 9, 12, 15, 18))
        for round_index in range(4)
    ]
    found = cell(summarize(rows, baseline="old"), "new", "code", 1.0)
    assert found["num_prompts"] == 6
    assert found["num_cycles"] == 240
    assert found["difference"] == pytest.approx(0.5)
    assert found["verdict"] == "better"
    worse = cell(summarize(rows, baseline="new"), "old", "code", 1.0)
    assert worse["verdict"] == "worse"


def test_a_planted_gain_is_found_only_where_it_is() -> None:
    random = np.random.default_rng(0)
    rows = []
    for prompt in range(24):
        hardness = random.uniform(0.3, 1.5)
        for name, gain in (("old", 1.0), ("same", 1.0), ("new", 1.3)):
            accepted = int(random.poisson(60 * hardness * gain))
            rows.append(row(name, "code", prompt, accepted=accepted, cycles=60))
    found = summarize(rows, baseline="old")
    assert cell(found, "same", "code")["verdict"] == "no difference shown"
    better = cell(found, "new", "code")
    assert better["verdict"] == "better"
    low, high = better["interval"]
    assert 0 < low < better["difference"] < high
    assert ranking(found)[0] == "new"


def test_the_offline_walk_is_held_against_serving_on_the_same_prompts() -> None:
    walked = {"offline_num_cycles": 10, "offline_num_accepted_tokens": 12}
    rows = [
        row("old", "code", 0, accepted=10, cycles=10, **walked),
        row("old", "code", 1, accepted=90, cycles=10),  # not walked: it must not count
    ]
    found = cell(summarize(rows, baseline="old"), "old", "code")
    assert found["offline_acceptance_length"] == 2.2
    assert found["offline_error_share"] == pytest.approx(0.1)


def test_drafters_are_ranked_over_all_temperatures() -> None:
    rows = [
        row("cold", "code", 0, accepted=20, cycles=10),
        row("cold", "code", 0, accepted=0, cycles=10, temperature=1.0),
        row("both", "code", 0, accepted=15, cycles=10),
        row("both", "code", 0, accepted=15, cycles=10, temperature=1.0),
    ]
    found = summarize(rows, baseline="cold")
    assert ranking(found) == ["both", "cold"]
    assert cell(found, "cold", "code", 0.0)["mean_acceptance_length"] == 3.0
    assert cell(found, "cold", "code", 1.0)["mean_acceptance_length"] == 1.0
    assert [each["temperature"] for each in found] == [0.0, 0.0, 1.0, 1.0]


def test_greedy_texts_that_differ_are_named() -> None:
    rows = [
        row("old", "code", 2, accepted=1, cycles=1),
        row("new", "code", 2, accepted=1, cycles=1, output_sha256="other"),
        row("new", "code", 2, accepted=1, cycles=1, output_sha256="drawn", temperature=1.0),
        row("old", "prose", 0, accepted=1, cycles=1),
        row("new", "prose", 0, accepted=1, cycles=1),
    ]
    assert different_texts(rows) == ["code, prompt 3"]
    assert different_texts(rows[2:]) == []
    assert different_texts([rows[0], rows[2]]) == []
