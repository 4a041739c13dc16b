"""`bench sweep`: which draft length is fastest, for each workload, concurrency, context length and temperature.

Cells are interleaved over rounds, every second round backwards, so that a machine that drifts does so in all of them.
The same items are asked in the same order in every cell, each time with a new salt, and compared item by item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import comb, log
from statistics import fmean
from typing import Any

import numpy as np

from outrider.benchmarking.client import ChatRequest
from outrider.benchmarking.integrity import examine
from outrider.benchmarking.prompt_length import pad_to
from outrider.benchmarking.record import make_record
from outrider.benchmarking.request_sets import Item, RequestSet
from outrider.benchmarking.run_summary import row_of, summarize
from outrider.benchmarking.runner import Asker, Load, Run, run_load
from outrider.benchmarking.statistics import CONFIDENCE, bounded_exp, mean_interval
from outrider.benchmarking.workloads import Workload
from outrider.errors import ConfigError, EngineFault

_MEAN_OF = ("output_tokens_per_s", "counted_tokens_per_s", "mean_acceptance_length", "acceptance_rate")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What draft lengths are compared under."""

    workload: str
    concurrency: int
    context_tokens: int | None
    """Of each prompt, about; None leaves prompts as they are."""
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All combinations of these, `num_rounds` times."""

    draft_lengths: Sequence[int]
    concurrencies: Sequence[int] = (1,)
    context_tokens: Sequence[int | None] = (None,)
    temperatures: Sequence[float] = (0.0,)
    num_rounds: int = 3

    def __post_init__(self) -> None:
        """ConfigError for a plan that compares nothing."""
        if len(set(self.draft_lengths)) < 2:
            raise ConfigError("a sweep compares draft lengths; give two or more, as in 0,3,5,7.")
        if self.num_rounds < 1:
            raise ConfigError(f"num_rounds is {self.num_rounds}; give at least 1.")

    def conditions(self, workloads: Sequence[str]) -> list[Condition]:
        """Every combination but for the draft length."""
        return [
            Condition(workload=name, concurrency=concurrency, context_tokens=tokens, temperature=temperature)
            for name, concurrency, tokens, temperature in product(
                workloads, self.concurrencies, self.context_tokens, self.temperatures
            )
        ]

    def num_runs(self, workloads: Sequence[str]) -> int:
        """Runs of all rounds."""
        return len(self.conditions(workloads)) * len(self.draft_lengths) * self.num_rounds


Cell = tuple[Condition, int]


def run_sweep(
    askers: Asker | Mapping[int, Asker],
    request_sets: Sequence[RequestSet],
    plan: Plan,
    load: Load,
    *,
    progress: Callable[[str], object] = str,
    keep: Callable[[Cell, Run], object] = lambda _cell, _run: None,
) -> dict[Cell, list[Run]]:
    """Runs of every condition and draft length, one a round. `load` says the rest: requests a run, tokens, warm-ups.

    One asker is a server that takes a draft length by request; several are servers by the draft length that each was
    started with, which requests do not name. `progress` hears what is about to run, and `keep` gets each run at once.

    EngineFault where a server drafts more than was asked for.
    """
    by_length = askers if isinstance(askers, Mapping) else {}
    asker = next(iter(by_length.values())) if isinstance(askers, Mapping) else askers
    conditions = plan.conditions([each.name for each in request_sets])
    sets = {
        (each.name, tokens): _padded_set(asker, each, tokens)
        for each, tokens in product(request_sets, plan.context_tokens)
    }
    cells = list(product(conditions, plan.draft_lengths))
    runs: dict[Cell, list[Run]] = {cell: [] for cell in cells}
    for number in range(plan.num_rounds):
        for condition, length in cells if number % 2 == 0 else reversed(cells):
            progress(f"{condition.workload}, n={length}, {condition.concurrency} at a time, round {number + 1}")
            request_set = sets[condition.workload, condition.context_tokens]
            run = run_load(
                by_length.get(length, asker), request_set, _load(load, condition, None if by_length else length)
            )
            _check_switch(run, length, is_asked=not by_length)
            runs[condition, length].append(run)
            keep((condition, length), run)
    return runs


def whole_rounds(runs: Mapping[Cell, list[Run]], num_cells: int) -> dict[Cell, list[Run]]:
    """Runs of the rounds that every cell has had: what a sweep that was stopped may be compared by."""
    num_rounds = min(map(len, runs.values())) if len(runs) == num_cells else 0
    return {cell: each[:num_rounds] for cell, each in runs.items()} if num_rounds else {}


def _load(load: Load, condition: Condition, draft_length: int | None) -> Load:
    asked = {} if draft_length is None else {"speculative": {"num_speculative_tokens": draft_length}}
    extra = {**load.extra, **asked}
    return replace(load, concurrency=condition.concurrency, temperature=condition.temperature, extra=extra)


def _padded_set(asker: Asker, request_set: RequestSet, num_tokens: int | None) -> RequestSet:
    if num_tokens is None:
        return request_set

    def count(item: Item) -> int:
        request = ChatRequest(messages=item.messages, prompt=item.prompt, tools=item.tools, max_tokens=1)
        sample = asker.complete(request)
        if sample.error is not None:
            raise ConfigError(f"the server refused a prompt of {request_set.name}: {sample.error}")
        if sample.num_prompt_tokens is None:
            raise EngineFault(
                f"the server did not say how long a prompt is ({sample.error}); it must answer with usage."
            )
        return sample.num_prompt_tokens

    items = tuple(pad_to(item, num_tokens, seed=at, count=count) for at, item in enumerate(request_set.items))
    return replace(request_set, items=items)


def _check_switch(run: Run, draft_length: int, *, is_asked: bool) -> None:
    """More drafts than were asked for mean that the server does not listen: the curve would be flat and false."""
    counted = run.counted
    if counted is None or not counted.num_drafts or counted.num_draft_tokens is None:
        return
    if counted.num_draft_tokens > draft_length * counted.num_drafts:
        drafted = f"drafts {counted.num_draft_tokens / counted.num_drafts:.1f} tokens a cycle"
        if not is_asked:
            raise EngineFault(f"the server named for draft length {draft_length} {drafted}. Start it with that length.")
        raise EngineFault(
            f"the server {drafted} though requests ask for {draft_length}, so it takes no draft length by request. "
            "Start one for each length, and give them as 0=URL 4=URL."
        )


def summarize_sweep(runs: dict[Cell, list[Run]]) -> list[dict[str, Any]]:
    """A row for each cell: its speed, against the best length of its condition, and whether that is n = 0.

    A run with a fault makes no length the best while there is another. The drafter loses where n = 0 is told apart from
    every draft length.
    """
    rows = []
    for condition in dict.fromkeys(condition for condition, _ in runs):
        speeds = {length: item_speeds(each) for (found, length), each in runs.items() if found == condition}
        faults = {length: _faults(runs[condition, length], length) for length in speeds}
        best = _best(speeds, faults)
        compared = {length: _ratio_interval(speeds[length], speeds[best], len(speeds)) for length in speeds}
        others = [each for length, (_, each) in compared.items() if length != best]
        is_apart = bool(others) and all(each and each[1] < 1 for each in others)
        for length in speeds:
            each = runs[condition, length]
            is_best = length == best
            ratio, interval = (1.0, None) if is_best else compared[length]
            summaries = [summarize(run) for run in each]
            rows.append(
                {
                    **vars(condition),
                    "num_speculative_tokens": length,
                    **{name: _mean([summary[name] for summary in summaries]) for name in _MEAN_OF},
                    "num_prompt_tokens": _mean([sample.num_prompt_tokens for run in each for sample in run.samples]),
                    "ratio_to_best": ratio,
                    "ratio_interval": interval,
                    "is_best": is_best,
                    "drafter_loses": best == 0 and is_apart,
                    "faults": faults[length],
                }
            )
    return rows


def _faults(runs: Sequence[Run], draft_length: int) -> list[str]:
    """Names of what spoils a cell; drafts that were asked for and not made are a fault of the point (T-065)."""
    found = {fault.name for run in runs for fault in examine(run) if fault.is_fatal or fault.name == "looping_answers"}
    if draft_length > 0 and any(run.counted is not None and run.counted.num_drafts == 0 for run in runs):
        found.add("not_drafted")
    return sorted(found)


def _best(speeds: Mapping[int, Mapping[int, float]], faults: Mapping[int, Sequence[str]]) -> int:
    """The fastest of the lengths with the fewest faults: a spoiled run may be fast for what spoiled it."""
    fewest = min(map(len, faults.values()))
    sound = [length for length in speeds if len(faults[length]) == fewest]
    return max(sound, key=lambda length: fmean(speeds[length].values()) if speeds[length] else float("-inf"))


def item_speeds(runs: Sequence[Run]) -> dict[int, float]:
    """Log of tokens a second, end to end, of each request by its place, rounds averaged: places are what pairs.

    A place at which any round failed or wrote nothing is left out.
    """
    places: dict[int, list[float]] = {}
    for run in runs:
        for place, sample in enumerate(run.samples):
            if sample.error is None and sample.num_output_tokens and sample.e2e_s > 0:
                places.setdefault(place, []).append(log(sample.num_output_tokens / sample.e2e_s))
    return {place: fmean(values) for place, values in places.items() if len(values) == len(runs)}


def _ratio_interval(
    speeds: dict[int, float], best: dict[int, float], num_lengths: int
) -> tuple[float | None, list[float] | None]:
    """Speed as a share of the best one's and its interval, paired by place.

    95 % hold for all pairs of lengths together (Bonferroni): which pairs are looked at, the data chose.
    """
    confidence = 1 - (1 - CONFIDENCE) / comb(max(2, num_lengths), 2)
    differences = np.array([speeds[place] - best[place] for place in speeds if place in best])
    if len(differences) < 2:
        return (bounded_exp(differences[0]) if len(differences) else None), None
    low, high = mean_interval(differences, confidence=confidence)
    return bounded_exp(differences.mean()), [bounded_exp(low), bounded_exp(high)]


def sweep_record(
    runs: dict[Cell, list[Run]],
    request_sets: Sequence[RequestSet],
    summary: list[dict[str, Any]],
    *,
    name: str,
    urls: Mapping[int, str],
    model: str,
) -> dict[str, Any]:
    """A record: an arm for each draft length, a row for each request with its cell and round.

    `urls` are those of servers, by draft length.
    """
    (first, *_) = next(iter(runs.values()))
    lengths = dict.fromkeys(length for _, length in runs)
    arms = [
        {
            "name": f"n={length}",
            "backend": first.server,
            "target": model,
            "drafter": None,
            "settings": {"url": urls[length], "num_speculative_tokens": length, "max_tokens": first.load.max_tokens},
        }
        for length in lengths
    ]
    rows = [
        {"arm": f"n={length}", **vars(condition), "round": number, "place": place, **row_of(sample)}
        for (condition, length), each in runs.items()
        for number, run in enumerate(each)
        for place, sample in enumerate(run.samples)
    ]
    prompts = tuple(prompt for each in request_sets for prompt in each.workload.prompts)
    workload = Workload("+".join(each.name for each in request_sets), prompts)
    return make_record(name, workload=workload, arms=arms, rows=rows, summary=summary)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
