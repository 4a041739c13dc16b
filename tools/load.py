"""Many streams at once on the embedded default: nothing lost or doubled, no page kept, memory level, texts as alone.

    make load

A client is any callable that answers one job; this script brings the one that calls the engine in this process. The
table goes to stderr, JSON to stdout; the exit code is 1 where a check failed.
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
from dataclasses import dataclass, field

import psutil

import outrider
from outrider import metrics
from outrider.backends.serving import LocalServing
from outrider.benchmarking.steadiness import Run, judge
from outrider.core import Chunk, SamplingParams
from outrider.errors import RequestError

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
WARM_UP_SHARE = 0.5  # until every number of rows has been seen, kernels still record passes
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Job:
    """One request to be made."""

    index: int
    kind: str  # "good", "cancelled" or "bad"
    prompt: str
    num_tokens: int
    cancel_after_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of it: "length", "stop", "abort", "refused", "error" or "lost"."""

    end: str
    token_ids: tuple[int, ...] = ()
    num_ends: int = 1


Client = Callable[[Job], Outcome]


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


@dataclass
class _Listener:
    """Counts the chunks of one request, those after the last included."""

    cancel_after_tokens: int | None
    cancel: Callable[[], None] = lambda: None
    token_ids: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, chunk: Chunk) -> None:
        self.token_ids += chunk.token_ids
        if self.cancel_after_tokens is not None and len(self.token_ids) > self.cancel_after_tokens:
            self.cancel()
        if chunk.finish_reason is not None:
            self.ends.append(chunk.finish_reason)
            self.ended.set()


def in_process_client(backend: LocalServing) -> Client:
    """Answer jobs by the engine's own thread."""

    def answer(job: Job) -> Outcome:
        listener = _Listener(job.cancel_after_tokens if job.kind == "cancelled" else None)
        prompt = [] if job.kind == "bad" else backend.tokenizer.encode(job.prompt)
        params = SamplingParams(max_tokens=job.num_tokens, ignore_eos=True)
        index_known = threading.Event()
        indices: list[int] = []

        def cancel() -> None:
            if index_known.wait(ANSWER_TIMEOUT_S):
                backend.cancel(indices[0])

        listener.cancel = lambda: threading.Thread(target=cancel).start()
        try:
            indices.append(backend.submit(prompt, params, listener))
        except RequestError:
            return Outcome("refused")
        index_known.set()
        if not listener.ended.wait(ANSWER_TIMEOUT_S):
            return Outcome("lost")
        return Outcome(listener.ends[0], tuple(listener.token_ids), len(listener.ends))

    return answer


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
    jobs: Sequence[Job], outcomes: dict[int, list[Outcome]], alone: dict[str, tuple[int, ...]]
) -> dict[str, int]:
    """How many jobs went wrong, by what was wrong."""
    faults = Counter[str](lost=0, duplicated=0, wrong_end=0, wrong_text=0)
    for job in jobs:
        found = outcomes.get(job.index, [])
        if not found or found[0].end == "lost":
            faults["lost"] += 1
            continue
        faults["duplicated"] += len(found) > 1 or found[0].num_ends > 1
        expected = {"good": ("length",), "bad": ("refused",), "cancelled": ("abort", "length")}[job.kind]
        faults["wrong_end"] += found[0].end not in expected
        token_ids = found[0].token_ids
        is_whole = job.kind != "good" or len(token_ids) == job.num_tokens
        faults["wrong_text"] += not is_whole or token_ids != alone[job.prompt][: len(token_ids)]
    return dict(faults)


def main() -> int:
    """Run the load and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    llm = outrider.load(config=outrider.EngineConfig(max_seats=16, context_length=256), device="cpu")
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    alone = {prompt: llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS}
    backend = LocalServing(llm, model="embedded")
    backend.start()
    jobs, process, times_s, memory = make_jobs(arguments.requests), psutil.Process(), list[float](), list[int]()
    num_free, began = backend.gauges().num_free_pages, time.perf_counter()

    def progress(num_done: int) -> None:
        if num_done >= arguments.requests * WARM_UP_SHARE:
            times_s.append(time.perf_counter() - began)
            memory.append(process.memory_info().rss)
        if num_done % 25 == 0:
            print(f"\r{num_done}/{len(jobs)} answered", end="", file=sys.stderr)

    outcomes = run_jobs(in_process_client(backend), jobs, num_streams=arguments.streams, progress=progress)
    seconds, gauges = time.perf_counter() - began, backend.gauges()
    backend.stop()
    steady = judge(Run(times_s=times_s, memory_bytes=memory))
    faults = check_outcomes(jobs, outcomes, alone) | {"pages_kept": num_free - gauges.num_free_pages}
    result = {
        "num_requests": len(jobs),
        "num_streams": arguments.streams,
        "ends": dict(Counter(outcome[0].end for outcome in outcomes.values())),
        "num_output_tokens": gauges.num_output_tokens,
        "num_cached_tokens": gauges.num_cached_tokens,
        "num_preemptions": gauges.num_preemptions,
        "mean_acceptance_length": metrics.mean_acceptance_length(gauges.acceptance),
        "seconds": round(seconds, 1),
        "output_tokens_per_s": round(gauges.num_output_tokens / seconds, 1),
        **{name: round(steady.figures[name], 5) for name in ("memory_growth", "memory_growth_error", "memory_step")},
        **faults,
    }
    print("\n" + "\n".join(f"{name:<24}{value}" for name, value in result.items()), file=sys.stderr)
    print(json.dumps(result))
    return int(any(faults.values()) or bool(steady.faults))


if __name__ == "__main__":
    sys.exit(main())
