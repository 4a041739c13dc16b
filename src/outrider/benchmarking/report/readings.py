"""What a record's charts need, read from its summary and rows. A record without a part of it gives an empty list.

What can be drawn is decided by what a record holds, not by its kind: a kind that is not known yet is drawn as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from outrider.benchmarking.report.curves import Point, Series, Span
from outrider.benchmarking.report.records import Record
from outrider.benchmarking.report.strips import Effect, Part
from outrider.benchmarking.report.wording import label, shown

Summary = dict[str, Any]

SPEEDS = ("tokens_per_s", "output_tokens_per_s")
AXES = (
    "num_speculative_tokens",
    "concurrency",
    "batch",
    "prompt_tokens",
    "request_rate",
    "context_tokens",
    "temperature",
)
NAMES = ("workload", "target", "arm", "baseline")
SHORT = {"num_speculative_tokens": "n", "context_tokens": "context", "prompt_tokens": "prompt"}
DRAWN = ("rates", "prompt_ratios", "prompt_indices")  # lists that charts show


@dataclass(frozen=True)
class Session:
    """The speed of each request, None where it has none; its phases; and what the speed is measured in."""

    name: str
    rates: tuple[float | None, ...]
    spans: tuple[Span, ...]
    unit: str


def interval_of(summary: Summary, key: str) -> tuple[float, float] | None:
    """The interval that stands beside a figure as `<key>_interval`."""
    pair = summary.get(f"{key}_interval")
    return (pair[0], pair[1]) if pair and None not in pair else None


def varying(summaries: Sequence[Summary], keys: Iterable[str]) -> list[str]:
    """Those of the keys that do not have one and the same value everywhere."""
    return [key for key in keys if len({repr(each.get(key)) for each in summaries}) > 1]


def cell_name(summary: Summary, keys: Sequence[str]) -> str:
    """What tells a cell from its neighbours, as in "code, batch 4"; an arm and its baseline are "a over b"."""
    words = [str(summary[key]) for key in ("workload", "target") if key in keys and summary.get(key)]
    if summary.get("arm") and ("arm" in keys or "baseline" in keys):
        words.append(f"{summary['arm']} over {summary['baseline']}" if summary.get("baseline") else summary["arm"])
    words += [f"{SHORT.get(key, label(key))} {shown(key, summary[key])}" for key in keys if _is_axis(summary, key)]
    return ", ".join(words)


def _is_axis(summary: Summary, key: str) -> bool:
    return key in AXES and summary.get(key) is not None


def _timed(record: Record) -> tuple[str, list[Summary]]:
    """The key of a table's speeds, and the cells that have one."""
    cells = record.summaries
    key = next((key for key in SPEEDS if any(cell.get(key) is not None for cell in cells)), SPEEDS[0])
    return key, [cell for cell in cells if cell.get(key) is not None]


def sweep_axis(record: Record) -> str | None:
    """The setting that a table of speeds goes over: the first that takes two values or more."""
    _, cells = _timed(record)
    return next((key for key in varying(cells, AXES) if all(_is_axis(cell, key) for cell in cells)), None)


def sweep_series(record: Record) -> list[Series]:
    """Tokens a second over `sweep_axis`, a series for every combination of the other settings, a peer's beside ours."""
    axis = sweep_axis(record)
    if axis is None:
        return []
    key, cells = _timed(record)
    others = [key for key in varying(cells, (*NAMES, *AXES)) if key != axis]
    groups: dict[str, list[Point]] = {}
    for cell in cells:
        point = Point(cell[axis], cell[key], interval_of(cell, key), is_best=cell.get("is_best") is True)
        name = cell_name(cell, others)
        if cell.get("peer_tokens_per_s") is None:
            groups.setdefault(name, []).append(point)
        else:
            groups.setdefault(f"{name}, ours".lstrip(", "), []).append(point)
            groups.setdefault(f"{name}, peer".lstrip(", "), []).append(Point(cell[axis], cell["peer_tokens_per_s"]))
    return [
        Series(name, tuple(sorted(points, key=lambda point: point.x)))
        for name, points in groups.items()
        if len(points) > 1
    ]


def acceptance_by_position(record: Record) -> list[tuple[str, list[float]]]:
    """Share of cycles that kept draft 1, 2, …, a list for every cell that has one."""
    cells = [each for each in record.summaries if each.get("acceptance_by_position")]
    keys = varying(cells, (*NAMES, *AXES))
    return [(cell_name(cell, keys), list(cell["acceptance_by_position"])) for cell in cells]


def effects(record: Record) -> list[Effect]:
    """Ratios of arms with their intervals and, where rows or summary hold them, the ratio of every prompt."""
    cells = [each for each in record.summaries if each.get("speedup") is not None]
    keys = varying(cells, (*NAMES, *AXES)) if len(cells) > 1 else NAMES
    arms = [arm.get("name") for arm in record.fields["arms"]]
    alone = f"{arms[1]} over {arms[0]}" if len(cells) == 1 and len(arms) > 1 else record.stem
    return [
        Effect(
            cell_name(cell, keys) or alone,
            cell["speedup"],
            interval_of(cell, "speedup"),
            paired_ratios(record, cell),
        )
        for cell in cells
    ]


def against_best(record: Record) -> list[Effect]:
    """Every draft length of a sweep as a share of the best of its condition, with the interval of that ratio."""
    cells = [each for each in record.summaries if each.get("ratio_to_best") is not None]
    keys = [key for key in varying(cells, (*NAMES, *AXES)) if key != "num_speculative_tokens"]
    best = {cell_name(cell, keys): cell["num_speculative_tokens"] for cell in cells if cell.get("is_best")}
    found = []
    for cell in cells:
        condition = cell_name(cell, keys)
        if not cell.get("is_best"):
            words = f"n {cell['num_speculative_tokens']} over n {best[condition]}"
            name = f"{condition}, {words}" if condition else words
            found.append(Effect(name, cell["ratio_to_best"], interval_of(cell, "ratio")))
    return found


def against_baseline(record: Record) -> list[Effect]:
    """What a cycle is worth with each drafter as a multiple of the baseline's, with the interval of the difference."""
    cells = [each for each in record.summaries if each.get("baseline") and each.get("mean_acceptance_length")]
    cells = [each for each in cells if each.get("difference") is not None]
    keys = varying(cells, ("drafter", "domain", "temperature"))
    found = []
    for cell in cells:
        base = cell["mean_acceptance_length"] - cell["difference"]
        ends = cell.get("interval")
        interval = (1 + ends[0] / base, 1 + ends[1] / base) if ends else None
        name = ", ".join(shown(key, cell[key]) if key != "temperature" else f"T = {cell[key]:g}" for key in keys)
        found.append(Effect(name or cell["drafter"], 1 + cell["difference"] / base, interval))
    return found


def paired_ratios(record: Record, summary: Summary) -> tuple[float, ...]:
    """The ratio of each prompt: the summary's own, else from the demo's decode times a token."""
    return tuple(summary.get("prompt_ratios") or _demo_ratios(record.fields["rows"]))


def _demo_ratios(rows: Sequence[dict[str, Any]]) -> list[float]:
    paces: dict[str, dict[int, float]] = {"plain": {}, "speculative": {}}
    for row in rows:
        if row.get("arm") in paces and row.get("decode_s") and len(row.get("token_ids", ())) > 1:
            paces[row["arm"]][row["prompt_index"]] = row["decode_s"] / (len(row["token_ids"]) - 1)
    both = sorted(paces["plain"].keys() & paces["speculative"].keys())
    return [paces["plain"][index] / paces["speculative"][index] for index in both]


def noise_floor(record: Record) -> float | None:
    """The largest that the record states, as a share: what two equal arms may differ by."""
    return max((each["noise_floor"] for each in record.summaries if each.get("noise_floor")), default=None)


def sessions(record: Record) -> list[Session]:
    """The speed of every request in order, and the phases found in them."""
    cells = [each for each in record.summaries if any(rate is not None for rate in each.get("rates") or ())]
    keys = varying(cells, NAMES)
    return [_session(cell_name(cell, keys), cell["rates"], cell.get("phases") or ()) for cell in cells]


def _session(name: str, rates: Sequence[float | None], phases: Sequence[dict[str, Any]]) -> Session:
    spans = tuple(Span(phase["name"], phase["first"], phase["last"]) for phase in phases)
    is_relative = any("relative_speed" in phase for phase in phases)
    return Session(name, tuple(rates), spans, "speed, fast = 1" if is_relative else "tokens/s")


def cycle_parts(record: Record) -> list[tuple[str, list[Part]]]:
    """Where a cycle goes, part by part, of every cell that was taken apart; the first pass of each cell only."""
    rows = [row for row in record.fields["rows"] if row.get("parts")]
    keys = varying(rows, ("num_speculative_tokens", "batch", "prompt_tokens"))
    found: dict[str, list[Part]] = {}
    for row in rows:
        parts = [Part(f"{each['half']}: {each['part']}", each["ms"], each.get("floor_ms")) for each in row["parts"]]
        found.setdefault(cell_name(row, keys), parts)
    return list(found.items())


def losing_cells(record: Record) -> list[str]:
    """Names of the series in which drafting nothing is fastest."""
    if sweep_axis(record) != "num_speculative_tokens":
        return []
    said = [cell for cell in record.summaries if "drafter_loses" in cell]
    if said:  # the record compared, and knows better than its heights whether 0 is told apart
        keys = [key for key in varying(said, (*NAMES, *AXES)) if key != "num_speculative_tokens"]
        return [cell_name(cell, keys) or record.stem for cell in said if cell["drafter_loses"] and cell.get("is_best")]
    return [series.name or record.stem for series in sweep_series(record) if series.best.x == 0]


def checks(record: Record) -> list[Summary]:
    """Rows that passed, failed or were left out, such as the rungs of `bench verify`."""
    return [row for row in record.fields["rows"] if row.get("status") in ("pass", "fail", "skip")]


def scalar_columns(summaries: Sequence[Summary]) -> list[str]:
    """Keys of all summaries in the order they first appear, raw series and nested tables left out."""
    keys = dict.fromkeys(chain.from_iterable(summaries))
    return [key for key in keys if key not in DRAWN and not any(_is_nested(each.get(key)) for each in summaries)]


def nested_tables(summary: Summary) -> list[tuple[str, list[Summary]]]:
    """Lists of objects inside a summary, each a table of its own."""
    return [(key, value) for key, value in summary.items() if _is_rows(value)]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _is_nested(value: Any) -> bool:
    return _is_rows(value) or (isinstance(value, list) and len(value) > 16)
