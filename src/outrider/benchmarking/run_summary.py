"""The figures of a run: ours under the glossary's names, beside them those of `vllm bench serve` under its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from statistics import fmean, median, pstdev
from typing import Any

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.integrity import Finding, cached_share, examine
from outrider.benchmarking.record import make_record
from outrider.benchmarking.request_sets import RequestSet
from outrider.benchmarking.runner import Run
from outrider.metrics import percentile, tokens_per_s

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_TEXT_FIELDS = {"text", "reasoning", "tool_calls"}


def summarize(run: Run, findings: Sequence[Finding] | None = None) -> dict[str, Any]:
    """Latencies in seconds with mean, p50, p90 and p99, throughput, acceptance, integrity; then vLLM's keys.

    Answers that failed are in `num_failed` alone. A figure without data is None.
    """
    findings = examine(run) if findings is None else findings
    sound = [sample for sample in run.samples if sample.error is None]
    num_tokens = sum(sample.num_output_tokens or 0 for sample in sound)
    has_usage = all(sample.num_output_tokens is not None for sample in sound)
    counted = run.counted
    num_counted = counted.num_generation_tokens if counted else None
    figures = {
        "num_requests": len(run.samples),
        "num_failed": len(run.samples) - len(sound),
        "num_warmups": run.load.warmups,
        "concurrency": run.load.concurrency if run.load.request_rate is None else None,
        "request_rate": run.load.request_rate,
        "temperature": run.load.temperature,
        "duration_s": run.duration_s,
        "num_prompt_tokens": sum(sample.num_prompt_tokens or 0 for sample in sound),
        "num_output_tokens": num_tokens if has_usage else None,
        "requests_per_s": len(sound) / run.duration_s if run.duration_s > 0 else None,
        "output_tokens_per_s": tokens_per_s(num_tokens=num_tokens, seconds=run.duration_s) if has_usage else None,
        "counted_tokens_per_s": (
            None if num_counted is None else tokens_per_s(num_tokens=num_counted, seconds=run.duration_s)
        ),
        "ttft_s": spread([sample.ttft_s for sample in sound]),
        "tpot_s": spread([sample.tpot_s for sample in sound]),
        "chunk_gap_s": spread([gap for sample in sound for gap in sample.chunk_gaps_s]),
        "e2e_latency_s": spread([sample.e2e_s for sample in sound]),
        "decode_tokens_per_s": spread([sample.tokens_per_s for sample in sound]),
        "cached_share": cached_share(run),
        "client_lag_s": run.client_lag_s,
        **_acceptance(run, sound),
        "integrity": {
            "status": "invalid" if any(each.is_fatal for each in findings) else "ok",
            "findings": [asdict(each) for each in findings],
        },
    }
    return {**figures, **_vllm_keys(run, sound, figures)}


def run_record(
    run: Run, request_set: RequestSet, *, name: str, summary: dict[str, Any], url: str, model: str
) -> dict[str, Any]:
    """A record (design §5): a row for each measured request, without its text."""
    settings = {field.name: getattr(run.load, field.name) for field in fields(run.load)}
    settings |= {"seed": run.seed, "num_warmups": run.load.warmups, "url": url}
    arm = {"name": model, "backend": run.server, "target": model, "drafter": None, "settings": settings}
    rows = [row_of(sample) for sample in run.samples]
    return make_record(name, workload=request_set.workload, arms=[arm], rows=rows, summary=summary)


def row_of(sample: Sample) -> dict[str, Any]:
    """A sample as a record keeps it: its figures, and how much text there was instead of the text."""
    row = {key: value for key, value in asdict(sample).items() if key not in _TEXT_FIELDS}
    return {**row, "num_characters": len(sample.text) + len(sample.reasoning), "num_tool_calls": len(sample.tool_calls)}


def spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Mean, percentiles and greatest of what is known; None where nothing is.

    A percentile is None where there are too few for one to lie beyond it (p90 of 10, p99 of 100): it is their greatest.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    kept = {name for name, share in SHARES.items() if len(known) * (1 - share) > 1 - 1e-9}
    percentiles = {name: percentile(known, share) if name in kept else None for name, share in SHARES.items()}
    return {"mean": fmean(known), **percentiles, "max": max(known)}


def _acceptance(run: Run, sound: Sequence[Sample]) -> dict[str, Any]:
    """From the server's counters; where they lack, from what the answers tell."""
    told = [sample.acceptance for sample in sound if sample.acceptance]
    fired = sum(each.get("num_draft_tokens", 0) > 0 for each in told) / len(sound) if told and sound else None
    counted = run.counted
    if counted is not None and counted.acceptance_length is not None:
        by_position = counted.acceptance_by_position
        return {
            "acceptance_source": "counters",
            "mean_acceptance_length": counted.acceptance_length,
            "acceptance_rate": counted.acceptance_rate,
            "acceptance_by_position": None if by_position is None else list(by_position),
            "fire_rate_steps": counted.fire_rate,
            "fire_rate_requests": fired,
        }
    num_steps = sum(each.get("num_spec_steps", 0) for each in told)
    num_drafted = sum(each.get("num_draft_tokens", 0) for each in told)
    num_accepted = sum(each.get("num_accepted_draft_tokens", 0) for each in told)
    return {
        "acceptance_source": "answers" if num_steps else None,
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else None,
        "acceptance_rate": num_accepted / num_drafted if num_drafted else None,
        "acceptance_by_position": None,
        "fire_rate_steps": None,
        "fire_rate_requests": fired,
    }


def _vllm_keys(run: Run, sound: Sequence[Sample], figures: dict[str, Any]) -> dict[str, Any]:
    """Keys of `vllm bench serve` results, in its units: milliseconds, and the acceptance rate in percent."""
    rate, duration_s, counted = figures["acceptance_rate"], figures["duration_s"], run.counted
    num_total = figures["num_prompt_tokens"] + (figures["num_output_tokens"] or 0)
    keys = {
        "backend": run.server,
        "num_prompts": len(run.samples),
        "max_concurrency": figures["concurrency"],
        "duration": duration_s,
        "completed": len(sound),
        "failed": figures["num_failed"],
        "total_input_tokens": figures["num_prompt_tokens"],
        "total_output_tokens": figures["num_output_tokens"],
        "request_throughput": figures["requests_per_s"],
        "output_throughput": figures["output_tokens_per_s"],
        "total_token_throughput": num_total / duration_s if duration_s > 0 else None,
        "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
        "spec_decode_acceptance_length": figures["mean_acceptance_length"],
        "spec_decode_num_drafts": counted.num_drafts if counted else None,
        "spec_decode_draft_tokens": counted.num_draft_tokens if counted else None,
        "spec_decode_accepted_tokens": counted.num_accepted_tokens if counted else None,
        "spec_decode_per_position_acceptance_rates": figures["acceptance_by_position"],
    }
    series: dict[str, list[float | None]] = {
        "ttft": [sample.ttft_s for sample in sound],
        "tpot": [sample.tpot_s for sample in sound],
        "itl": [gap for sample in sound for gap in sample.chunk_gaps_s],
        "e2el": [sample.e2e_s for sample in sound],
    }
    return keys | {key: value for name, values in series.items() for key, value in _milliseconds(name, values).items()}


def _milliseconds(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    known_ms = [1e3 * value for value in values if value is not None]
    found: dict[str, float | None] = {
        "mean": fmean(known_ms) if known_ms else None,
        "median": median(known_ms) if known_ms else None,
        "std": pstdev(known_ms) if known_ms else None,
        **{key: percentile(known_ms, share) for key, share in SHARES.items()},
    }
    return {f"{key}_{name}_ms": value for key, value in found.items()}
