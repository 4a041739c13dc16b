"""Prints the README's tables of figures from the records they name: `python tools/readme_figures.py`."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = {
    "greedy": "benchmarks/results/cpu-demo-greedy.json",
    "temperature 1": "benchmarks/results/cpu-demo-sampled.json",
    "temperature 1, top-k 64, top-p 0.95": "benchmarks/results/cpu-demo-filtered.json",
}
COLUMNS = {
    "same text": "identical",
    "speedup": "speedup",
    "acceptance length": "mean_acceptance_length",
    "outside repeats": "acceptance_outside_repeats",
    "plain tokens/s": "plain_tokens_per_s",
    "kernel gain": "kernel_gain",
}
COMPARISONS = {
    "drafter against plain, greedy, two cores": "benchmarks/results/cpu-compare.json",
    "the same on one H200, bf16": "benchmarks/results/h200-compare.json",
}


def shown(value: float | bool | None) -> str:
    """As the table writes it."""
    if value is None:
        return "–"
    return ("yes" if value else "NO") if isinstance(value, bool) else f"{value:.2f}"


def table() -> str:
    """Markdown, one row a record."""
    lines = ["| decoding | " + " | ".join(COLUMNS) + " | record |", "|---|" + "---|" * (len(COLUMNS) + 1)]
    for decoding, name in RECORDS.items():
        summary = json.loads((ROOT / name).read_text())["summary"]
        cells = [shown(summary[key]) for key in COLUMNS.values()]
        lines.append(f"| {decoding} | " + " | ".join(cells) + f" | [raw rows]({name}) |")
    return "\n".join(lines)


def comparison_table() -> str:
    """Markdown, one row a record of `bench compare`; shares as percentages."""
    columns = ("same text", "speedup", "interval", "noise floor", "prompts × rounds", "record")
    lines = ["| comparison | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for comparison, name in COMPARISONS.items():
        summary = json.loads((ROOT / name).read_text())["summary"]
        low, high = summary["speedup_interval"]
        cells = (
            shown(summary["identical"]),
            shown(summary["speedup"]),
            f"{low:.2f} to {high:.2f} ({100 * summary['confidence']:g} %)",
            f"{100 * summary['noise_floor']:.1f} %",
            f"{summary['num_prompts']} × {summary['num_rounds']}",
            f"[raw rows]({name})",
        )
        lines.append(f"| {comparison} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), comparison_table(), sep="\n\n")
