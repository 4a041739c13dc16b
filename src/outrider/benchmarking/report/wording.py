"""How identifiers and values of a record are shown: names with their units, numbers with sensible digits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ABSENT = "–"
LATENCY = re.compile(r"(mean|median|std|p\d+)_(ttft|tpot|itl|e2el|chunk_gap)_ms")
TITLES = {
    "demo": "Plain and drafted, prompt by prompt",
    "bench-decode": "Decoding on made-up weights",
    "bench-run": "One server under load",
    "bench-compare": "Arms compared in pairs",
    "bench-sweep": "Which settings are fastest",
    "bench-soak": "A long session",
    "bench-verify": "The ladder of checks",
    "bench-quality": "Answers with and without drafting",
    "train-select": "Drafters ranked by what a cycle is worth",
}
LABELS = {
    "identical": "same text",
    "speedup": "speedup",
    "mean_acceptance_length": "acceptance length",
    "acceptance_outside_repeats": "acceptance length outside repeats",
    "num_speculative_tokens": "draft length n",
    "output_throughput": "output tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "kernel_gain": "kernel gain",
    "e2el": "end to end",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "chunk_gap": "gap between chunks",
    "floor_share": "share of the floor",
    "ms_per_cycle": "ms per cycle",
    "mcnemar_p": "McNemar p",
    "p_value": "p",
    "memory_growth_mib": "memory growth, MiB",
}
UNITS = {"_tokens_per_s": " tokens/s", "_tb_per_s": " TB/s", "_per_s": "/s", "_ms": ", ms", "_us": ", µs", "_s": ", s"}
SHARES = (
    "share",
    "retention",
    "acceptance_rate",
    "acceptance_by_position",
    "fire_rate_steps",
    "fire_rate_requests",
    "accuracy",
    "noise_floor",
    "minimum_detectable_effect",
    "claim",
    "confidence",
    "memory_growth",
    "memory_growth_error",
    "memory_step",
    "acceptance_drift",
)
TIMES = ("speedup", "ratio", "gain", "ratio_to_best", "speedup_interval", "ratio_interval")
FOREIGN = "spec_decode_"  # keys that follow another tool's units, a rate in per cent among them


def title_of(name: str) -> str:
    """What a record of this name is called; its own name where it is of an unknown kind."""
    return TITLES.get(name) or TITLES.get(f"bench-{name}") or name.replace("-", " ").replace("_", " ")


def label(key: str) -> str:
    """An identifier as people read it, its unit included: `num_output_tokens` is "output tokens"."""
    if key in LABELS:
        return LABELS[key]
    if key == "tokens_per_s":
        return "tokens/s"
    if latency := LATENCY.fullmatch(key):
        return f"{label(latency[2])}, {latency[1]} ms"
    unit = next((ending for ending in UNITS if key.endswith(ending)), "")
    words = key.removesuffix(unit).removeprefix("num_").replace("_", " ") if unit else key.removeprefix("num_")
    return words.replace("_", " ") + UNITS.get(unit, "")


def shown(key: str, value: Any) -> str:
    """A value as the report writes it: shares as per cent, ratios with ×, lists with commas, none as a dash."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(shown(key, each) for each in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{label(name)} {shown(name, each)}" for name, each in value.items())
    if not isinstance(value, int | float):
        return str(value)
    if key.startswith(FOREIGN):
        return number(value)
    if key.endswith(SHARES):
        return percent(value)
    return times(value) if key.endswith(TIMES) else number(value)


def number(value: float) -> str:
    """Counts whole, measures with two decimals, three below 1, none from a thousand on."""
    if isinstance(value, int) or value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.1e}"


def brief(value: float) -> str:
    """Three digits, for a label inside a drawing."""
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(value: float) -> str:
    """A share as per cent."""
    return f"{100 * value:.1f} %" if abs(value) < 0.9995 and round(1000 * value) % 10 else f"{100 * value:.0f} %"


def times(value: float) -> str:
    """A ratio, as in 1.63×; near 1, where it decides, with a third decimal."""
    return f"{value:.3f}×" if 0.8 < value < 1.25 and value != 1 else f"{value:.2f}×"


def between(key: str, interval: Sequence[float]) -> str:
    """An interval in words, both ends with as many decimals."""
    low, high = interval
    if key.endswith(TIMES):
        digits = 3 if any(0.8 < end < 1.25 for end in (low, high)) else 2
        return f"{low:.{digits}f}× to {high:.{digits}f}×"
    return f"{shown(key, low)} to {shown(key, high)}"
