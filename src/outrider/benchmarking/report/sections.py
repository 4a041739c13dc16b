"""One section a record: what was compared and where, headline figures, warnings, charts and all figures."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.benchmarking.record import STOPPED, num_missing
from outrider.benchmarking.report import cautions, drawings, readings
from outrider.benchmarking.report.blocks import REST, Figure, Section, Table
from outrider.benchmarking.report.records import Record
from outrider.benchmarking.report.wording import (
    ABSENT,
    LATENCY,
    between,
    brief,
    label,
    number,
    percent,
    shown,
    times,
    title_of,
)

HEADLINES = (  # of alternatives in one pair of brackets, the first that a summary has
    ("speedup", "verdict"),
    ("output_tokens_per_s", "output_throughput"),
    ("mean_acceptance_length",),
    ("speculative_tokens_per_s",),
    ("plain_tokens_per_s",),
    ("median_ttft_ms",),
    ("median_tpot_ms",),
    ("acceptance_rate",),
    ("speed_retention",),
    ("kernel_gain",),
)
MAX_FIGURES = 4
SPREADS = {"ttft_s": "ttft", "tpot_s": "tpot", "chunk_gap_s": "chunk_gap", "e2e_latency_s": "e2el"}
GIB = 2**30


def section_of(record: Record) -> Section:
    """All that the report says of one record."""
    fields = record.fields
    raw = {key: fields.get(key) for key in ("command", "created", "source", "environment", "workload", "arms")}
    return Section(
        anchor=re.sub(r"[^a-z0-9]+", "-", record.stem.lower()).strip("-"),
        title=_title(record),
        facts=tuple(facts(record)),
        figures=tuple(figures(record))[:MAX_FIGURES],
        findings=tuple(cautions.findings(record)),
        warnings=tuple(cautions.warnings(record)),
        charts=tuple(drawings.charts(record)),
        tables=tuple(tables(record)),
        raw=json.dumps({key: value for key, value in raw.items() if value is not None}, indent=2, ensure_ascii=False),
        is_published=record.is_published,
    )


def _title(record: Record) -> str:
    """The record's own title, else its kind's and how it sampled, so that a kind's records can be told apart."""
    if record.fields.get("title"):
        return str(record.fields["title"])
    sampling = _sampling(record.summaries[0]) if len(record.summaries) == 1 else ""
    return title_of(record.fields["name"]) + (f": {sampling}" if sampling else "")


def _sampling(summary: dict[str, Any]) -> str:
    if summary.get("temperature") is None:
        return ""
    if summary["temperature"] == 0:
        return "greedy"
    limits = {"top-k": summary.get("top_k", 0), "top-p": summary.get("top_p", 1.0)}
    words = [f"{name} {value:g}" for name, value in limits.items() if value not in (None, 0, 1)]
    return ", ".join([f"temperature {summary['temperature']:g}", *words])


def facts(record: Record) -> Iterator[tuple[str, str]]:
    """What was compared, on what, where and when."""
    fields, arms = record.fields, record.fields["arms"]
    yield "record", record.path.name
    yield "workload", fields["workload"]["name"]
    if arms:
        yield "arms", ", ".join(str(arm.get("name", ABSENT)) for arm in arms)
    for key in ("target", "drafter"):
        values = dict.fromkeys(str(arm[key]) for arm in arms if arm.get(key))
        if values:
            yield key, ", ".join(values)
    yield "where", where(fields["environment"])
    if fields.get("created"):
        yield "when", fields["created"][:10]
    if fields.get("source"):
        yield "source", fields["source"]


def where(environment: dict[str, Any]) -> str:
    """The machine in a line: its GPUs, or its processor; a published record describes it in words."""
    if environment.get("description"):
        return str(environment["description"])
    gpus = Counter(device["name"] for device in environment.get("accelerators") or ())
    if gpus:
        return ", ".join(name if num == 1 else f"{num} × {name}" for name, num in gpus.items())
    cores, memory = environment.get("num_usable_cores"), environment.get("memory_bytes")
    words = [environment.get("cpu_model"), f"{cores} cores" if cores else None]
    return ", ".join(filter(None, [*words, f"{memory / GIB:.0f} GiB" if memory else None])) or "not recorded"


def figures(record: Record) -> Iterator[Figure]:
    """Headlines with their intervals: of one comparison its own, of a table its best cell or its comparisons.

    That a run was stopped comes first, since the first one stands at the top of the page.
    """
    if record.fields.get("stopped"):
        num_rows = len(record.fields["rows"])
        yield Figure("run", STOPPED, f"{num_rows} of {num_rows + num_missing(record.fields.get('missing') or ())} rows")
    if len(record.summaries) == 1:
        summary = record.summaries[0]
        for keys in HEADLINES:
            key = next((key for key in keys if summary.get(key) is not None), None)
            if key and summary[key] != STOPPED:
                yield Figure(label(key), shown(key, summary[key]), _interval_note(summary, key))
        for session in readings.sessions(record):
            known = [rate for rate in session.rates if rate is not None]
            for word, rate in (("slowest", min(known)), ("fastest", max(known))):
                title = f"{word} request, {session.name}" if session.name else f"{word} request"
                yield Figure(title, number(rate), f"{session.unit}; request {session.rates.index(rate) + 1}")
        return
    for effect in readings.effects(record):
        note = f"interval {between('ratio', effect.interval)}" if effect.interval else ""
        yield Figure(effect.name, times(effect.ratio), note)
    axis = readings.sweep_axis(record)
    for series in sorted(readings.sweep_series(record), key=lambda series: -series.best.y):
        best, name = series.best, f", {series.name}" if series.name else ""
        interval = f", {between('y', best.interval)}" if best.interval else ""
        setting = f"{readings.SHORT.get(axis or '', label(axis or ''))} = {brief(best.x)}"
        yield Figure(f"best tokens/s{name}", number(best.y), f"at {setting}{interval}")


def _interval_note(summary: dict[str, Any], key: str) -> str:
    interval = readings.interval_of(summary, key)
    if interval is None:
        return ""
    confidence = summary.get("confidence")
    return f"{percent(confidence) + ' ' if confidence else ''}interval {between(key, interval)}"


def tables(record: Record) -> Iterator[tuple[str, Table]]:
    """Latencies, tables inside the summary (phases, rungs) and then all other figures."""
    if readings.checks(record):
        yield "Checks", _table(readings.checks(record))
    summaries = record.summaries
    columns = readings.scalar_columns(summaries)
    if len(summaries) == 1:
        summary = summaries[0]
        yield from _latency_table(summary)
        for key, rows in readings.nested_tables(summary):
            yield label(key).capitalize(), _table(rows)
        left = [key for key in columns if not LATENCY.fullmatch(key) and key not in (*SPREADS, "integrity")]
        rows_of_two = [(label(key), shown(key, summary[key])) for key in left]
        if summary.get("integrity"):
            rows_of_two.append(("integrity", str(summary["integrity"]["status"])))
        yield REST, Table(("figure", "value"), tuple(rows_of_two))
    elif summaries:
        yield REST, _table(summaries)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = readings.scalar_columns(rows)
    cells = tuple(tuple(shown(key, row.get(key)) for key in columns) for row in rows)
    return Table(tuple(label(key) for key in columns), cells)


def _latency_table(summary: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    found = {
        (statistic, measure): None if seconds is None else 1e3 * seconds
        for key, measure in SPREADS.items()
        for statistic, seconds in (summary.get(key) or {}).items()
    } or {(match[1], match[2]): summary[match[0]] for key in summary if (match := LATENCY.fullmatch(key))}
    if not found:
        return
    statistics = list(dict.fromkeys(statistic for statistic, _ in found))
    measures = dict.fromkeys(measure for _, measure in found)
    rows = tuple(
        (label(measure), *(shown("", found.get((statistic, measure))) for statistic in statistics))
        for measure in measures
    )
    yield "Latency, ms", Table(("measure", *statistics), rows)
