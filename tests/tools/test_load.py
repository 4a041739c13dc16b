"""The load test notices what it is there for: requests lost, answered twice, ended wrongly, or with another text."""

from __future__ import annotations

import pytest

from tools.load import MAX_TOKENS, PROMPTS, Job, Outcome, check_outcomes, make_jobs, run_jobs

ALONE = {prompt: tuple(range(i, i + MAX_TOKENS)) for i, prompt in enumerate(PROMPTS)}
NO_FAULTS = {"lost": 0, "duplicated": 0, "wrong_end": 0, "wrong_text": 0}


def perfect(job: Job) -> Outcome:
    if job.kind == "bad":
        return Outcome("refused")
    num_tokens = job.num_tokens if job.kind == "good" else job.cancel_after_tokens
    return Outcome("length" if job.kind == "good" else "abort", ALONE[job.prompt][:num_tokens])


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
        ("duplicated", [Outcome("length", (0, 1, 2, 3), num_ends=2)]),
        ("duplicated", [Outcome("length", (0, 1, 2, 3))] * 2),
        ("wrong_end", [Outcome("abort", (0, 1, 2, 3))]),
        ("wrong_text", [Outcome("length", (0, 1, 2))]),
        ("wrong_text", [Outcome("length", (0, 1, 2, 9))]),
    ],
)
def test_faults_are_counted(fault: str, outcomes: list[Outcome]) -> None:
    job = Job(0, "good", PROMPTS[0], 4)
    assert check_outcomes([job], {0: outcomes} if outcomes else {}, ALONE) == {**NO_FAULTS, fault: 1}
