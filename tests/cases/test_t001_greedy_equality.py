"""T-001: greedy ids with any drafter and any acceptance pattern are those of a decode without cache or drafter.

Seen red: a cycle that takes one draft more than it accepted; caches of a window without slack.
"""

from __future__ import annotations

import functools

import pytest

from outrider.core import SamplingParams
from outrider.engine.proposer import Proposer
from tests.cases.common import toy_proposer
from tests.scripted import ScriptedProposer, make_test_engine, run_requests
from tests.toy import reference_greedy, toy_drafter, toy_target

NUM_TOKENS = 40
PROMPTS = [[(11 * i + 5 * length) % 95 for i in range(length)] for length in (1, 7, 8, 9, 25)]
SCRIPTS = {"all-0": (0,), "all-full": (), "mixed": (3, 0, 2, 4, 1)}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)
TARGET = toy_target()


@functools.cache
def expected(prompt: int) -> list[int]:
    return reference_greedy(TARGET, PROMPTS[prompt], NUM_TOKENS)


def proposer(name: str) -> Proposer:
    if name == "random":
        return toy_proposer(toy_drafter(TARGET), num_seats=len(PROMPTS))
    texts = [prompt + expected(i) for i, prompt in enumerate(PROMPTS)]
    return ScriptedProposer(texts, script=SCRIPTS[name])


@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
@pytest.mark.parametrize("drafter", [*SCRIPTS, "random"])
def test_t001_drafted_greedy_is_plain_greedy(drafter: str, draft_length: int) -> None:
    engine = make_test_engine(
        TARGET, proposer(drafter), max_seats=len(PROMPTS), num_speculative_tokens=draft_length, prefill_rows=8
    )
    found = run_requests(engine, *((prompt, GREEDY) for prompt in PROMPTS))
    assert found == [expected(i) for i in range(len(PROMPTS))]


def test_t001_plain_engine() -> None:
    found = run_requests(make_test_engine(TARGET, prefill_rows=8, max_seats=5), *((each, GREEDY) for each in PROMPTS))
    assert found == [expected(i) for i in range(len(PROMPTS))]
    assert all(len(set(ids)) > 3 for ids in found)  # texts that do not just repeat themselves
