"""Time decoding on an engine with made-up weights: whole answers, cycles, gaps between replays, parts of a cycle."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from outrider import environment, metrics
from outrider.backends.dummy import Models, build_dummy
from outrider.backends.exactness import check_exact
from outrider.backends.floor import CycleBytes, cycle_bytes, floor_figures, read_bandwidth
from outrider.backends.kernel_trace import list_kernels, split_halves, summarize_parts, trace_events
from outrider.backends.local import (
    are_rows_exact,
    check_drafter_quantization,
    make_engine,
    resolve_config,
    resolve_device,
)
from outrider.backends.replays import ReplayGaps
from outrider.core import SamplingParams
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.state import RequestState
from outrider.errors import ConfigError, EngineFault
from outrider.kernels.ops import select_kernels

READY_TOKENS = 16  # an engine is ready when it has written so many a request
WARMUP_TOKENS = 64  # and warm after so many more
EXACT_TOKENS = 64
LOWEST_ID, HIGHEST_ID = 8, 200_000  # of random prompts: past the special tokens


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination to time."""

    num_speculative_tokens: int
    batch: int
    prompt_tokens: int | None = None
    """None is the work's."""
    acceptance_length: float | None = None
    """Imposed; None leaves acceptance to the drafter."""


@dataclass(frozen=True, kw_only=True)
class DecodeWork:
    """What every cell runs."""

    target: str
    prompt_tokens: int = 512
    max_tokens: int = 512
    context_length: int | None = None
    """None is just enough."""
    prefill_rows: int | None = None
    """None is the engine's own."""
    num_runs: int = 3
    num_traced_cycles: int = 8
    is_exactness_checked: bool = False
    drafter_quantization: str | None = None
    """"int8" or "int4"."""
    kernels: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        """ConfigError for sizes that leave nothing to time."""
        if self.prompt_tokens < 1 or self.max_tokens < 2 or self.num_runs < 1 or self.num_traced_cycles < 0:
            raise ConfigError("a prompt has at least 1 token, an answer 2, and there is at least 1 run. Give more.")
        if self.needed_context < self.prompt_tokens + self.max_tokens:
            raise ConfigError(
                f"context_length={self.context_length} is less than prompt and answer together, "
                f"{self.prompt_tokens + self.max_tokens} tokens. Raise it."
            )

    @property
    def needed_context(self) -> int:
        """Positions of the longest text, or what was asked for."""
        return self.context_length or self.prompt_tokens + self.max_tokens + 1


def random_prompt(work: DecodeWork, *, run: str, index: int, vocab_size: int) -> list[int]:
    """The same random token ids on every machine."""
    chosen = random.Random(f"{run}/{index}")
    return [2, *(chosen.randrange(LOWEST_ID, min(HIGHEST_ID, vocab_size)) for _ in range(work.prompt_tokens - 1))]


def time_decoding(
    work: DecodeWork,
    cells: Sequence[Cell],
    *,
    progress: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda _found: None,
) -> dict[str, Any]:
    """Everything about all cells, as JSON can hold it. Weights are made once.

    A cell that fails is named under `failed` with its `fault`, and the others go on. ConfigError where a cell asks for
    more than drafter or engine can do. `progress` hears of each of `num_steps` steps, `keep` after each cell of all
    that is there.
    """
    device = resolve_device(work.device)
    with_drafter = any(cell.num_speculative_tokens > 0 for cell in cells)
    check_drafter_quantization(work.drafter_quantization, has_drafter=with_drafter)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    works = [work if cell.prompt_tokens is None else replace(work, prompt_tokens=cell.prompt_tokens) for cell in cells]
    progress("weights")
    started = time.perf_counter()
    models = build_dummy(
        work.target,
        kernels=select_kernels(work.kernels, dtype=dtype, device=device),
        dtype=dtype,
        device=device,
        context_length=max(each.needed_context for each in works),
        with_drafter=with_drafter,
        drafter_quantization=work.drafter_quantization,
    )
    weights_s = time.perf_counter() - started
    configs = [engine_config(of_cell, cell, models, device) for of_cell, cell in zip(works, cells, strict=True)]
    progress("bandwidth")
    bandwidth = read_bandwidth(device)
    found: dict[str, Any] = {
        "target": work.target,
        "kernels": models.target.kernels.name,
        "row_invariant": models.target.kernels.row_invariant,
        "is_synthetic": any(cell.num_speculative_tokens and cell.acceptance_length for cell in cells),
        "weights_s": weights_s,
        "read_tb_per_s": bandwidth / 1e12,
        "work": asdict(work),
        "cells": [],
        "failed": [],
        "environment": environment.describe(),
    }
    for cell, of_cell, config in zip(cells, works, configs, strict=True):
        _try_cell(found, models, cell, of_cell, config, bandwidth=bandwidth, progress=progress)
        keep(found)
    return found


def _try_cell(
    found: dict[str, Any],
    models: Models,
    cell: Cell,
    work: DecodeWork,
    config: EngineConfig,
    *,
    bandwidth: float,
    progress: Callable[[str], None],
) -> None:
    """Add the cell to what was found, or what made it fail; nothing of it stays in memory either way."""
    try:
        figures = time_cell(models, cell, work, config, bandwidth=bandwidth, progress=progress)
        found["cells"].append(figures)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - out of memory, a kernel's fault: another cell may do
        key = {"num_speculative_tokens": cell.num_speculative_tokens, "batch": cell.batch}
        fault = f"{type(error).__name__}: {error}"
        found["failed"].append({**key, "prompt_tokens": work.prompt_tokens, "fault": fault})
    gc.unfreeze()
    gc.collect()
    with suppress(RuntimeError):  # a device that is broken says so once more, in the next cell
        torch.cuda.empty_cache()  # what a failed cell held has sizes that another does not ask for


def num_steps(work: DecodeWork, cells: Sequence[Cell]) -> int:
    """How often `time_decoding` reports progress."""
    return 2 + len(cells) * (work.num_runs + 2 + work.is_exactness_checked)


def engine_config(work: DecodeWork, cell: Cell, models: Models, device: torch.device) -> EngineConfig:
    """The engine of a cell: room for its batch, no limit on rows; ConfigError where that cannot be."""
    if models.drafter is not None and cell.num_speculative_tokens > models.drafter.config.max_draft_length:
        limit = models.drafter.config.max_draft_length
        raise ConfigError(
            f"num_speculative_tokens={cell.num_speculative_tokens}, but the drafter of {work.target} drafts at most "
            f"{limit}. Lower it."
        )
    settings: dict[str, Any] = {} if work.prefill_rows is None else {"prefill_rows": work.prefill_rows}
    if cell.acceptance_length is not None and cell.num_speculative_tokens > 0:
        settings["synthetic_acceptance_length"] = cell.acceptance_length
    config = EngineConfig(
        context_length=work.needed_context,
        max_seats=cell.batch,
        num_speculative_tokens=cell.num_speculative_tokens if cell.num_speculative_tokens else None,
        row_budget=max(EngineConfig.row_budget, cell.batch * (cell.num_speculative_tokens + 1)),
        **settings,
    )
    target = models.target
    config = resolve_config(
        config,
        device=device,
        max_positions=target.config.max_positions,
        row_invariant=are_rows_exact(target.kernels, target.config),
    )
    if config.max_seats < cell.batch:
        raise ConfigError(
            f"batch={cell.batch}, but the engine runs {config.max_seats} at a time on {device}. Lower it."
        )
    return config


def time_cell(
    models: Models,
    cell: Cell,
    work: DecodeWork,
    config: EngineConfig,
    *,
    bandwidth: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Boot an engine, run its batch several times, then trace some cycles; rows and figures."""
    name = f"n={cell.num_speculative_tokens} batch={cell.batch} prompt={work.prompt_tokens}"
    drafter = models.drafter if cell.num_speculative_tokens else None
    progress(f"{name} boot")
    started = time.perf_counter()
    engine = make_engine(models.target, drafter, None, config)
    gc.collect()
    gc.freeze()  # as a server does
    run_batch(engine, replace(work, max_tokens=min(READY_TOKENS, work.max_tokens)), cell, run="ready")
    ready_s = time.perf_counter() - started
    run_batch(engine, replace(work, max_tokens=min(WARMUP_TOKENS, work.max_tokens)), cell, run="warm-up")
    rows = []
    for run in range(work.num_runs):
        progress(f"{name} run {run + 1}")
        rows.append(run_batch(engine, work, cell, run=str(run)))
    progress(f"{name} parts")
    mean_context = work.prompt_tokens + work.max_tokens // 2
    needed = cycle_bytes(models.target, drafter, context_tokens=mean_context, batch=cell.batch)
    traced = trace_parts(engine, work, cell, needed, bandwidth=bandwidth)
    del engine
    is_exact = None
    if work.is_exactness_checked:
        progress(f"{name} exactness")
        is_exact = is_cell_exact(models, cell, work)
    return {
        **asdict(cell),
        "prompt_tokens": work.prompt_tokens,
        "ready_s": ready_s,
        "rows": rows,
        **pooled_figures(rows, needed, bandwidth=bandwidth),
        **traced,
        "bit_exact": is_exact,
    }


def run_batch(engine: Engine, work: DecodeWork, cell: Cell, *, run: str) -> dict[str, Any]:
    """Prefill the whole batch, then decode it to its end; only the second part is `decode_s`."""
    started = time.perf_counter()
    requests = begin_batch(engine, work, cell, run=run)
    decode_started = time.perf_counter()
    gaps, num_cycles, host_us, launch_us = ReplayGaps(), 0, list[float](), list[float]()
    with gaps.watching():
        while engine.has_work:
            engine.step()
            gaps.end_cycle()
            num_cycles += 1
            cycle = engine.device_cycle
            if num_cycles > 1 and cycle is not None and cycle.host_s is not None:  # before the first come prompts
                host_us.append(round(1e6 * cycle.host_s, 1))
                launch_us.append(round(1e6 * cycle.launch_s, 1))
    seconds = time.perf_counter() - decode_started
    if engine.drafter_fault is not None:
        raise EngineFault(f"drafting was given up, so that there is nothing to time: {engine.drafter_fault}")
    acceptance = metrics.pool(request.acceptance for request in requests)
    return {
        "run": run,
        "prefill_s": decode_started - started,
        "decode_s": seconds,
        "num_decoded_tokens": sum(len(request.output_token_ids) - 1 for request in requests),
        "num_cycles": num_cycles,
        "num_distinct_tokens": len({token for request in requests for token in request.output_token_ids}),
        "acceptance_length": metrics.mean_acceptance_length(acceptance),
        "gaps_us": [round(gap, 1) for gap in gaps.gaps_us()],
        "host_us": host_us,
        "launch_us": launch_us,
    }


def begin_batch(engine: Engine, work: DecodeWork, cell: Cell, *, run: str) -> list[RequestState]:
    """Requests with their first token each, and nothing decoded; EngineFault where one failed before it."""
    vocab_size = engine.target.config.vocab_size
    params = SamplingParams(max_tokens=work.max_tokens, ignore_eos=True)
    prompts = [random_prompt(work, run=run, index=index, vocab_size=vocab_size) for index in range(cell.batch)]
    requests = [engine.add(prompt, params) for prompt in prompts]
    while not all(request.output_token_ids for request in requests):
        engine.prefill()
        if any(request.finish_reason is not None and not request.output_token_ids for request in requests):
            raise EngineFault("a prompt failed before its first token, so that there is nothing to time.")
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize()
    return requests


def pooled_figures(rows: Sequence[dict[str, Any]], needed: CycleBytes | None, *, bandwidth: float) -> dict[str, Any]:
    """Figures of a cell: medians of its runs, as the peer's are, and percentiles of all gaps together.

    A gap is what the device waited between the replays of one cycle and before the first of them, by its own clock.
    `host` is from the host's waking to the end of its launch, most of which the device does not wait for, and `launch`
    the driver's part of that.
    """
    gaps, host, launch = ([us for row in rows for us in row[name]] for name in ("gaps_us", "host_us", "launch_us"))
    ms = median(1e3 * row["decode_s"] / row["num_cycles"] for row in rows)
    return {
        "tokens_per_s": median(row["num_decoded_tokens"] / row["decode_s"] for row in rows),
        "ms_per_cycle": ms,
        "prefill_s": median(row["prefill_s"] for row in rows),
        "bytes_per_cycle": needed.total if needed else None,
        **floor_figures(ms, needed.total if needed else None, bandwidth),
        "gap_p50_us": metrics.percentile(gaps, 0.5),
        "gap_p99_us": metrics.percentile(gaps, 0.99),
        "host_p50_us": metrics.percentile(host, 0.5),
        "host_p99_us": metrics.percentile(host, 0.99),
        "launch_p50_us": metrics.percentile(launch, 0.5),
        "measured_acceptance_length": mean_of(row["acceptance_length"] for row in rows),
    }


def mean_of(values: Any) -> float | None:
    """The mean of those that are there."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def trace_parts(
    engine: Engine, work: DecodeWork, cell: Cell, needed: CycleBytes | None, *, bandwidth: float
) -> dict[str, Any]:
    """Parts and kernels of a few cycles at the context that the runs have on average; empty on a CPU."""
    if engine.target.device.type != "cuda" or work.num_traced_cycles == 0:
        return {"parts": [], "kernels_seen": [], "traced_cycles": 0}
    num_tokens = min(work.num_traced_cycles * (cell.num_speculative_tokens + 1) + 1, work.max_tokens)
    prompt_tokens = min(work.prompt_tokens + work.max_tokens // 2, work.needed_context - num_tokens)
    middle = replace(work, prompt_tokens=prompt_tokens, max_tokens=num_tokens)
    requests = begin_batch(engine, middle, cell, run="trace")
    num_cycles = 0
    if engine.device_cycle is not None:
        engine.device_cycle.runs_ahead = False  # or a beginning too many would be among so few cycles

    def cycles() -> None:
        nonlocal num_cycles
        while engine.has_work and num_cycles < work.num_traced_cycles:
            engine.step()
            num_cycles += 1

    events, replayed = trace_events(cycles)
    for request in requests:
        if request.finish_reason is None:
            engine.abort(request)
    halves = split_halves(events, replayed)
    floors = {"draft": needed.draft, "verify": needed.verify} if needed else {}
    return {
        "parts": summarize_parts(halves, floors, num_cycles=num_cycles, bandwidth=bandwidth),
        "kernels_seen": list_kernels(halves, num_cycles=num_cycles),
        "traced_cycles": num_cycles,
    }


def is_cell_exact(models: Models, cell: Cell, work: DecodeWork) -> bool:
    """Whether neighbours or drafts change the text of the cell's batch; acceptance is the drafter's own here."""
    vocab_size, device = models.target.config.vocab_size, models.target.device
    return check_exact(
        models if cell.num_speculative_tokens else Models(models.target, None),
        engine_config(work, replace(cell, acceptance_length=None), models, device),
        [random_prompt(work, run="exact", index=index, vocab_size=vocab_size) for index in range(cell.batch)],
        draft_length=cell.num_speculative_tokens,
        num_tokens=min(EXACT_TOKENS, work.max_tokens),
    )
