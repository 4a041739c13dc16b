"""`train select`: drafters ranked by what a cycle is worth with them, per domain, paired by prompt with a baseline.

Rows are answers with the counts of their cycles (`training.acceptance`). A domain's acceptance length is 1 + accepted
drafts ÷ cycles, over all its prompts; intervals are about its difference from the baseline's on the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.benchmarking.statistics import CONFIDENCE, MIN_PROMPTS, RatioDifference, ratio_difference

ALL = "all"
"""The domain that stands for every prompt together."""
Row = dict[str, Any]
Counts = dict[Any, tuple[int, int]]


def summarize(rows: Sequence[Row], *, baseline: str, confidence: float = CONFIDENCE) -> list[dict[str, Any]]:
    """An object for every drafter, domain and temperature, best drafter first; ALL comes first where domains are many.

    `difference` and `interval` are None for the baseline itself and where no prompt has cycles with both drafters.
    """
    drafters, domains = _distinct(rows, "drafter"), _distinct(rows, "domain")
    shown = [ALL, *domains] if len(domains) > 1 else domains
    found = [
        _summary(rows, drafter, domain, temperature, baseline, confidence)
        for temperature in _distinct(rows, "temperature")
        for domain in shown
        for drafter in drafters
    ]
    order = ranking(found)
    return sorted(
        found, key=lambda each: (each["temperature"], shown.index(each["domain"]), order.index(each["drafter"]))
    )


def ranking(summary: Sequence[dict[str, Any]]) -> list[str]:
    """Drafters, best first: by the mean over temperatures of their acceptance length over all prompts."""
    domain = ALL if any(each["domain"] == ALL for each in summary) else summary[0]["domain"]
    lengths: dict[str, list[float]] = {}
    for each in summary:
        if each["domain"] == domain:
            lengths.setdefault(each["drafter"], []).append(each["mean_acceptance_length"] or 0.0)
    return sorted(lengths, key=lambda drafter: -sum(lengths[drafter]) / len(lengths[drafter]))


def different_texts(rows: Sequence[Row]) -> list[str]:
    """Greedy answers that are not the same with every drafter, as "domain, prompt n": there must be none."""
    texts: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        if row["temperature"] == 0:
            texts.setdefault((row["domain"], row["prompt_index"]), set()).add(row["output_sha256"])
    return [f"{domain}, prompt {index + 1}" for (domain, index), found in texts.items() if len(found) > 1]


def _distinct(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _summary(
    rows: Sequence[Row], drafter: str, domain: str, temperature: float, baseline: str, confidence: float
) -> dict[str, Any]:
    def counts(of: str, prefix: str = "") -> Counts:
        return _counts(rows, of, domain, temperature, prefix)

    ours, offline = counts(drafter), counts(drafter, "offline_")
    against = None if drafter == baseline else _difference(ours, counts(baseline), confidence)
    served = _length({key: ours[key] for key in offline if key in ours})
    walked = _length(offline)
    return {
        "drafter": drafter,
        "domain": domain,
        "temperature": temperature,
        "mean_acceptance_length": _length(ours),
        "baseline": baseline,
        "difference": against.difference if against else None,
        "interval": list(against.interval) if against and against.interval else None,
        "confidence": confidence,
        "verdict": _verdict(against),
        "num_prompts": len(ours),
        "num_cycles": sum(num_cycles for _, num_cycles in ours.values()),
        "offline_acceptance_length": walked,
        "offline_error_share": walked / served - 1 if walked and served else None,
    }


def _counts(rows: Sequence[Row], drafter: str, domain: str, temperature: float, prefix: str) -> Counts:
    """Accepted drafts and cycles of every prompt that has cycles, its rounds added up."""
    found: Counts = {}
    for row in rows:
        is_asked = row["drafter"] == drafter and row["temperature"] == temperature and domain in (ALL, row["domain"])
        num_cycles = row[f"{prefix}num_cycles"] if is_asked else None
        if num_cycles:
            key = (row["domain"], row["prompt_index"])
            accepted, cycles = found.get(key, (0, 0))
            found[key] = accepted + row[f"{prefix}num_accepted_tokens"], cycles + num_cycles
    return found


def _length(counts: Counts) -> float | None:
    num_cycles = sum(cycles for _, cycles in counts.values())
    return 1 + sum(accepted for accepted, _ in counts.values()) / num_cycles if num_cycles else None


def _difference(ours: Counts, theirs: Counts, confidence: float) -> RatioDifference | None:
    both = [key for key in ours if key in theirs]
    if not both:
        return None
    return ratio_difference([ours[key] for key in both], [theirs[key] for key in both], confidence=confidence)


def _verdict(found: RatioDifference | None) -> str | None:
    """What so many prompts allow one to say; None of the baseline."""
    if found is None:
        return None
    if found.num_prompts < MIN_PROMPTS or found.interval is None:
        return "too few prompts"
    low, high = found.interval
    return "better" if low > 0 else "worse" if high < 0 else "no difference shown"
