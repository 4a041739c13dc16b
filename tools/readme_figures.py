"""Prints the README's table of figures from the records it names: `python tools/readme_figures.py`."""

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


if __name__ == "__main__":
    print(table())
