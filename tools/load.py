"""Many streams at once over HTTP on the embedded default: nothing lost, doubled or changed, no page kept, memory level.

    make load

A client is any callable that answers one job. The table goes to stderr, JSON to stdout; the exit code is 1 where a
check failed.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from outrider.benchmarking.steadiness import Run, judge
from tools.load_server import Client, Job, Outcome, ServerProcess, http_client, running_server

PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6,",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are",
    "Monday, Tuesday, Wednesday,",
    "SELECT name, age FROM people WHERE",
    "A short history of the steam engine. In the beginning, water was pumped out of mines by horses, and it was",
    "import numpy as np\n\nx = np.arange(10)\n",
)
MIN_TOKENS, MAX_TOKENS = 4, 64
CANCELLED_SHARE, BAD_SHARE = 0.1, 0.05
WARM_UP_SHARE = 0.2  # of all jobs: the allocators' first peaks
MAX_SECONDS = 600.0


def make_jobs(num_jobs: int, *, seed: int = 0) -> list[Job]:
    """Jobs in a shuffled order, with exact shares of cancelled and bad ones."""
    rng = random.Random(seed)
    num_cancelled, num_bad = round(num_jobs * CANCELLED_SHARE), round(num_jobs * BAD_SHARE)
    kinds = ["cancelled"] * num_cancelled + ["bad"] * num_bad + ["good"] * (num_jobs - num_cancelled - num_bad)
    rng.shuffle(kinds)
    jobs = []
    for index, kind in enumerate(kinds):
        num_tokens = rng.randint(MIN_TOKENS, MAX_TOKENS)
        cancel_after = rng.randrange(num_tokens) if kind == "cancelled" else 0
        jobs.append(Job(index, kind, rng.choice(PROMPTS), num_tokens, cancel_after))
    return jobs


def run_jobs(
    client: Client, jobs: Sequence[Job], *, num_streams: int, progress: Callable[[int], None]
) -> dict[int, list[Outcome]]:
    """Keep `num_streams` jobs open until all are answered; outcomes by job."""
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    outcomes: dict[int, list[Outcome]] = {}
    lock = threading.Lock()

    def work() -> None:
        while True:
            try:
                job = todo.get_nowait()
            except queue.Empty:
                return
            outcome = client(job)
            with lock:
                outcomes.setdefault(job.index, []).append(outcome)
                progress(len(outcomes))

    threads = [threading.Thread(target=work) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def check_outcomes(
    jobs: Sequence[Job], outcomes: dict[int, list[Outcome]], alone: dict[str, Outcome]
) -> dict[str, int]:
    """How many jobs went wrong, by what was wrong."""
    faults = Counter[str](lost=0, duplicated=0, wrong_end=0, wrong_text=0)
    for job in jobs:
        found = outcomes.get(job.index, [])
        if not found or found[0].end == "lost":
            faults["lost"] += 1
            continue
        faults["duplicated"] += len(found) > 1 or found[0].num_ends > 1
        expected = {"good": ("length",), "bad": ("refused",), "cancelled": ("cancelled", "length")}[job.kind]
        faults["wrong_end"] += found[0].end not in expected
        is_whole = job.kind != "good" or len(found[0].tokens) == job.num_tokens
        faults["wrong_text"] += job.kind != "bad" and not (is_whole and _begins(alone[job.prompt], found[0]))
    return dict(faults)


def _begins(whole: Outcome, begun: Outcome) -> bool:
    """True if an answer is the beginning of another; a character may be cut off at its end."""
    return whole.tokens[: len(begun.tokens)] == begun.tokens and whole.text.startswith(begun.text.rstrip("\ufffd"))


def count_unended(jobs: Sequence[Job], before: dict[str, float], after: dict[str, float]) -> int:
    """By how many ends the server's own count differs from the jobs that it should have begun."""
    name = "request_success_total"
    return abs(round(after.get(name, 0.0) - before.get(name, 0.0)) - sum(job.kind != "bad" for job in jobs))


def run_load(server: ServerProcess, *, num_jobs: int, num_streams: int) -> dict[str, object]:
    """Each prompt alone, then all jobs at once; what was found."""
    client, jobs = http_client(server.url), make_jobs(num_jobs)
    alone = {prompt: client(Job(i, "good", prompt, MAX_TOKENS)) for i, prompt in enumerate(PROMPTS)}
    before, memory = server.quiet_metrics(), list[int]()
    began, cpu_began = time.perf_counter(), server.cpu_seconds()

    def progress(num_done: int) -> None:
        if num_done >= WARM_UP_SHARE * num_jobs:
            memory.append(server.memory_bytes())
        if num_done % 25 == 0:
            print(f"\r{num_done}/{num_jobs} answered", end="", file=sys.stderr, flush=True)

    outcomes = run_jobs(client, jobs, num_streams=num_streams, progress=progress)
    seconds, cpu_s, after = time.perf_counter() - began, server.cpu_seconds() - cpu_began, server.quiet_metrics()
    steady = judge(Run(times_s=range(len(memory)), memory_bytes=memory))
    faults = check_outcomes(jobs, outcomes, alone) | {
        "unended": count_unended(jobs, before, after),
        "pages_kept": round(after["kv_cache_usage_perc"] - before["kv_cache_usage_perc"], 6),
        "grown": len(steady.faults),
        "late": int(seconds > MAX_SECONDS),
    }
    return {
        "num_requests": num_jobs,
        "num_streams": num_streams,
        "ends": dict(Counter(outcome[0].end for outcome in outcomes.values())),
        **_rates(before, after, seconds),
        "server_cpu_s": round(cpu_s, 1),
        "memory_bytes": memory[-1],
        "memory_growth": round(steady.figures["memory_growth"], 5),
        "memory_step": round(steady.figures["memory_step"], 5),
        "faults": faults,
    }


def _rates(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """What the server counted in the meantime."""
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    num_tokens, num_cycles = gained["generation_tokens_total"], gained["spec_decode_num_drafts_total"]
    num_accepted = gained["spec_decode_num_accepted_tokens_total"]
    return {
        "num_output_tokens": round(num_tokens),
        "num_cached_tokens": round(gained["prefix_cache_hits_total"]),
        "num_preemptions": round(gained["num_preemptions_total"]),
        "mean_acceptance_length": round(1 + num_accepted / max(1.0, num_cycles), 3),
        "seconds": round(seconds, 1),
        "output_tokens_per_s": round(num_tokens / seconds, 1),
    }


def main() -> int:
    """Run the load and say what was found."""
    parser = argparse.ArgumentParser(description="many streams at once on the embedded default, over HTTP")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    with running_server(num_seats=arguments.streams) as server:
        result = run_load(server, num_jobs=arguments.requests, num_streams=arguments.streams)
    print("\n" + "\n".join(f"{name:<24}{value}" for name, value in result.items()), file=sys.stderr)
    print(json.dumps(result))
    faults = result["faults"]
    return int(not isinstance(faults, dict) or any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
