"""Made-up records, one of each kind that a report draws, with figures that a test can look for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

MACHINE = {"accelerators": [{"name": "NVIDIA H200"}], "git": {"commit": "abc", "dirty": False}}


def record(name: str, summary: Any, **fields: Any) -> dict[str, Any]:
    """A record of the given kind and summary; other fields may be replaced."""
    arms = [{"name": "plain", "backend": "local"}, {"name": "drafter", "backend": "local"}]
    return {
        "schema": 1,
        "name": name,
        "created": "2026-11-30T12:00:00+00:00",
        "command": f"outrider {name}",
        "environment": MACHINE,
        "workload": {"name": "prose", "sha256": "0" * 64},
        "arms": arms,
        "rows": [],
        "summary": summary,
        **fields,
    }


def compare(*, ratio: float = 1.61, spread: float = 0.2, verdict: str | None = "faster by 61 %") -> dict[str, Any]:
    """Two arms in pairs, with an interval, a noise floor and the ratio of every prompt."""
    chance = random.Random(0)
    summary = {
        "arm": "drafter",
        "baseline": "plain",
        "speedup": ratio,
        "speedup_interval": [ratio - 0.07, ratio + 0.08],
        "confidence": 0.95,
        "noise_floor": 0.021,
        "verdict": "faster" if verdict else None,
        "verdict_text": verdict,
        "identical": True,
        "mean_acceptance_length": 2.67,
        "prompt_ratios": [ratio * chance.gauss(1, spread) for _ in range(24)],
    }
    return record("bench-compare", summary)


def sweep(*, best: int = 6) -> dict[str, Any]:
    """Speed over draft lengths and numbers of requests at a time; every curve is highest at `best`."""
    cells = []
    for concurrency in (1, 2, 4, 8):
        for n in (0, 2, 4, 6, 8, 12):
            speed = (50 * concurrency**0.8) * (1.8 - 0.004 * (n - best) ** 2)
            cell = {"num_speculative_tokens": n, "concurrency": concurrency, "tokens_per_s": speed}
            cells.append(cell | {"tokens_per_s_interval": [0.95 * speed, 1.05 * speed]})
    return record("bench-sweep", cells)


def own_sweep() -> dict[str, Any]:
    """Draft lengths as `bench sweep` compares them: every one with its share of the best, item by item."""
    cells = []
    for workload, best in (("code", 7), ("prose", 0)):
        for n, speed in ((0, 50.0), (3, 80.0 if best else 45.0), (7, 100.0 if best else 40.0)):
            top = 100.0 if best else 50.0
            cell = {"workload": workload, "concurrency": 1, "context_tokens": None, "temperature": 0.0}
            cell |= {"num_speculative_tokens": n, "output_tokens_per_s": speed, "ratio_to_best": speed / top}
            interval = None if n == best else [speed / top - 0.02, speed / top + 0.02]
            faults = ["request_errors"] if (workload, n) == ("code", 3) else []
            cells.append(cell | {"ratio_interval": interval, "is_best": n == best, "faults": faults})
    return record("sweep", cells)


def own_run() -> dict[str, Any]:
    """One server as `bench run` sums it up: spreads in seconds, findings, and the keys of another tool beside them."""
    summary = {
        "output_tokens_per_s": 263.7,
        "ttft_s": {"mean": 0.09, "p50": 0.0815, "p90": 0.1, "p99": 0.163},
        "tpot_s": {"mean": 0.0135, "p50": 0.01225, "p90": 0.02, "p99": 0.0245},
        "chunk_gap_s": None,
        "acceptance_rate": 0.6,
        "integrity": {
            "status": "invalid",
            "findings": [
                {"name": "other_tenant", "is_fatal": True, "detail": "41 tokens were not ours"},
                {"name": "no_counters", "is_fatal": False, "detail": "the server has none"},
            ],
        },
        "output_throughput": 263.7,
        "spec_decode_acceptance_rate": 60.0,
        "mean_ttft_ms": 90.0,
    }
    return record("run", summary)


def run() -> dict[str, Any]:
    """One server: latencies under vLLM's names, acceptance by position."""
    latencies = {
        f"{statistic}_{measure}_ms": value * factor
        for measure, value in (("ttft", 81.5), ("tpot", 12.25), ("e2el", 1640.0))
        for statistic, factor in (("mean", 1.1), ("median", 1.0), ("p99", 2.0))
    }
    rates = [0.89, 0.78, 0.66, 0.57, 0.5, 0.43, 0.39]
    summary = {"output_throughput": 263.7, "mean_acceptance_length": 5.22, "acceptance_by_position": rates}
    return record("bench-run", {**summary, "fire_rate": 0.997, "num_requests": 200, **latencies})


def soak(*, num_turns: int = 6) -> dict[str, Any]:
    """A session that falls to 60 tokens/s for four requests in every ten."""
    chance = random.Random(1)
    rates, phases = [], []
    for turn in range(num_turns):
        rates += [chance.gauss(220, 4) for _ in range(6)] + [chance.gauss(60, 2) for _ in range(4)]
        first = 10 * turn + 1
        phases.append({"name": "fast", "first": first, "last": first + 5, "cause": "drafting"})
        phases.append({"name": "degraded", "first": first + 6, "last": first + 9, "cause": "drafting off"})
    return record("bench-soak", {"rates": rates, "phases": phases, "period": 10, "speed_retention": 0.99})


def decode() -> dict[str, Any]:
    """Cells beside a peer's, one of them taken apart."""
    summary = [
        {"target": "31b", "num_speculative_tokens": n, "batch": 1, "tokens_per_s": ours, "peer_tokens_per_s": peer}
        | {"ratio": ours / peer, "floor_share": share}
        for n, ours, peer, share in ((0, 57.4, 56.16, 0.82), (7, 281.3, 263.7, 0.84))
    ]
    parts = [
        {"half": half, "part": part, "ms": ms, "floor_ms": floor}
        for half, part, ms, floor in (
            ("draft", "products", 1.31, 0.98),
            ("draft", "head", 0.71, 0.63),
            ("verify", "products", 14.52, 13.31),
            ("verify", "head", 0.7, 0.63),
            ("verify", "attention", 0.34, 0.06),
            ("verify", "other", 0.41, None),
        )
    ]
    rows = [{"arm": "outrider", "num_speculative_tokens": 7, "batch": 1, "parts": parts}]
    arms = [
        {"name": "outrider", "target": "31b", "settings": {"is_synthetic": True}},
        {"name": "vllm", "target": "31b"},
    ]
    return record("bench-decode", summary, rows=rows, arms=arms)


def write(folder: Path, **records: dict[str, Any]) -> list[Path]:
    """Write records under their names."""
    paths = []
    for name, fields in records.items():
        path = folder / f"{name.replace('_', '-')}.json"
        path.write_text(json.dumps(fields), encoding="utf-8")
        paths.append(path)
    return paths
