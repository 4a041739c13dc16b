"""The load test notices what it is there for: requests lost, answered twice, ended wrongly, or with another text."""

from __future__ import annotations

import pytest

from tools.load import MAX_TOKENS, PROMPTS, check_outcomes, count_unended, make_jobs, run_jobs
from tools.load_server import Job, Outcome

TOKENS = {prompt: tuple(f" {i}" for i in range(first, first + MAX_TOKENS)) for first, prompt in enumerate(PROMPTS)}
ALONE = {prompt: Outcome("length", tokens, "".join(tokens)) for prompt, tokens in TOKENS.items()}
NO_FAULTS = {"lost": 0, "duplicated": 0, "wrong_end": 0, "wrong_text": 0}
ZERO_TO_THREE = (" 0", " 1", " 2", " 3")


def perfect(job: Job) -> Outcome:
    if job.kind == "bad":
        return Outcome("refused")
    tokens = TOKENS[job.prompt][: job.num_tokens if job.kind == "good" else job.cancel_after_tokens]
    return Outcome("length" if job.kind == "good" else "cancelled", tokens, "".join(tokens))


def test_jobs_have_their_shares() -> None:
    jobs = make_jobs(100)
    kinds = [job.kind for job in jobs]
    assert (kinds.count("cancelled"), kinds.count("bad"), kinds.count("good")) == (10, 5, 85)
    assert all(4 <= job.num_tokens <= 64 for job in jobs)
    assert jobs == make_jobs(100)


def test_every_job_is_answered_once() -> None:
    jobs, seen = make_jobs(60), list[int]()
    outcomes = run_jobs(perfect, jobs, num_streams=8, progress=seen.append)
    assert sorted(outcomes) == list(range(60))
    assert sorted(seen) == list(range(1, 61))
    assert check_outcomes(jobs, outcomes, ALONE) == NO_FAULTS


@pytest.mark.parametrize(
    ("fault", "outcomes"),
    [
        ("lost", []),
        ("lost", [Outcome("lost")]),
        ("duplicated", [Outcome("length", ZERO_TO_THREE, " 0 1 2 3", num_ends=2)]),
        ("duplicated", [Outcome("length", ZERO_TO_THREE, " 0 1 2 3")] * 2),
        ("wrong_end", [Outcome("cancelled", ZERO_TO_THREE, " 0 1 2 3")]),
        ("wrong_text", [Outcome("length", ZERO_TO_THREE[:3], " 0 1 2")]),
        ("wrong_text", [Outcome("length", (*ZERO_TO_THREE[:3], " 9"), " 0 1 2 3")]),
        ("wrong_text", [Outcome("length", ZERO_TO_THREE, " 0 2 3")]),
    ],
)
def test_faults_are_counted(fault: str, outcomes: list[Outcome]) -> None:
    job = Job(0, "good", PROMPTS[0], 4)
    assert check_outcomes([job], {0: outcomes} if outcomes else {}, ALONE) == {**NO_FAULTS, fault: 1}


def test_a_character_may_be_cut_off_at_the_end() -> None:
    alone = {PROMPTS[0]: Outcome("length", ("a", "<0xC3>", "<0xA9>"), "aé")}
    found = Outcome("length", ("a", "<0xC3>"), "a\ufffd")
    assert check_outcomes([Job(0, "good", PROMPTS[0], 2)], {0: [found]}, alone) == NO_FAULTS


def test_ends_that_the_server_counts_otherwise_are_noticed() -> None:
    jobs, before = make_jobs(100), {"request_success_total": 10.0}
    assert count_unended(jobs, before, {"request_success_total": 105.0}) == 0
    assert count_unended(jobs, before, {"request_success_total": 104.0}) == 1
    assert count_unended(jobs, {}, {"request_success_total": 97.0}) == 2
