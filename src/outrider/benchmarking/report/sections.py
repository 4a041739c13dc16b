"""One section a record: what was compared and where, headline figures, warnings, charts and all figures."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from outrider.benchmarking.report import curves, readings, strips
from outrider.benchmarking.report.blocks import REST, Chart, Figure, Section, Table
from outrider.benchmarking.report.records import Record
from outrider.benchmarking.report.wording import (
    ABSENT,
    LATENCY,
    between,
    label,
    number,
    percent,
    shown,
    times,
    title_of,
)

HEADLINES = (
    "speedup",
    "output_throughput",
    "output_tokens_per_s",
    "mean_acceptance_length",
    "speculative_tokens_per_s",
    "plain_tokens_per_s",
    "median_ttft_ms",
    "median_tpot_ms",
    "acceptance_rate",
    "fire_rate",
    "speed_retention",
    "kernel_gain",
)
MAX_FIGURES = 4
SETTLED = ("faster", "slower", "equal")  # verdicts of a comparison whose sample carries them
WIDE_PX, NARROW_PX = 760, 350  # what charts are drawn for; the style sheet shows one of the two
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
        findings=tuple(findings(record)),
        warnings=tuple(warnings(record)),
        charts=tuple(charts(record)),
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
    """Headlines with their intervals: of one comparison its own, of a table its best cell or its comparisons."""
    if len(record.summaries) == 1:
        summary = record.summaries[0]
        for key in HEADLINES:
            if summary.get(key) is not None:
                yield Figure(label(key), shown(key, summary[key]), _interval_note(summary, key))
        for name, rates, _ in readings.sessions(record):
            for word, rate in (("slowest", min(rates)), ("fastest", max(rates))):
                title = f"{word} request, {name}" if name else f"{word} request"
                yield Figure(title, number(rate), f"tokens/s, request {rates.index(rate) + 1}")
        return
    for effect in readings.effects(record):
        note = f"interval {between('ratio', effect.interval)}" if effect.interval else ""
        yield Figure(effect.name, times(effect.ratio), note)
    axis = readings.sweep_axis(record)
    for series in sorted(readings.sweep_series(record), key=lambda series: -series.best.y):
        best, name = series.best, f", {series.name}" if series.name else ""
        interval = f", {between('y', best.interval)}" if best.interval else ""
        setting = f"{readings.SHORT.get(axis or '', label(axis or ''))} = {number(best.x)}"
        yield Figure(f"best tokens/s{name}", number(best.y), f"at {setting}{interval}")


def _interval_note(summary: dict[str, Any], key: str) -> str:
    interval = readings.interval_of(summary, key)
    if interval is None:
        return ""
    confidence = summary.get("confidence")
    return f"{percent(confidence) + ' ' if confidence else ''}interval {between(key, interval)}"


def warnings(record: Record) -> Iterator[str]:
    """What a reader must not miss."""
    settings = [arm.get("settings") or {} for arm in record.fields["arms"]]
    if record.is_published:
        yield "Published figures, typed in from the source named. Nothing here measured them."
    if any(each.get("is_synthetic") for each in settings):
        yield "Acceptance was imposed: this times cycles, and its text is nobody's."
    if (record.fields["environment"].get("git") or {}).get("dirty"):
        yield "Made from a working tree with changes that were not committed."
    if any(summary.get("identical") is False for summary in record.summaries):
        yield "The arms did not write the same text."
    for name in readings.losing_cells(record):
        yield f"The drafter loses here: drafting nothing is fastest ({name})."
    yield from _verdicts(record)
    yield from record.fields.get("notes") or ()


def findings(record: Record) -> Iterator[str]:
    """What the record itself claims of each comparison, where its sample carries a claim."""
    for summary in record.summaries:
        if summary.get("verdict") in SETTLED and summary.get("verdict_text"):
            yield f"{summary['arm']} over {summary['baseline']}: {summary['verdict_text']}."


def _verdicts(record: Record) -> Iterator[str]:
    """What may not be claimed of a comparison: in the record's own words, else by its interval and noise floor."""
    floor = readings.noise_floor(record)
    compared = [summary for summary in record.summaries if summary.get("speedup") is not None]
    for effect, summary in zip(readings.effects(record), compared, strict=True):
        if summary.get("verdict_text"):
            if summary.get("verdict") not in SETTLED:
                yield f"{effect.name}: {summary['verdict_text']}."
        elif effect.interval and effect.interval[0] <= 1 <= effect.interval[1]:
            yield f"No difference is shown for {effect.name}: the interval holds 1."
        elif floor and 1 / (1 + floor) <= effect.ratio <= 1 + floor:
            yield f"A tie for {effect.name}: the ratio lies within the noise floor of {percent(floor)}."


def charts(record: Record) -> Iterator[Chart]:
    """Every drawing that the record has the figures for."""
    yield from _sweep_charts(record)
    yield from _paired_charts(record)
    yield from _session_charts(record)
    yield from _acceptance_charts(record)
    yield from _part_charts(record)


def _chart(title: str, caption: str, table: Table, draw: Callable[..., str]) -> Chart:
    """Drawn for both widths; `draw` takes `width`."""
    return Chart(title, caption, draw(width=WIDE_PX), draw(width=NARROW_PX), table)


def _sweep_charts(record: Record) -> Iterator[Chart]:
    series, axis = readings.sweep_series(record), readings.sweep_axis(record)
    if not series or axis is None:
        return
    xs = sorted({point.x for each in series for point in each.points})
    columns = (label(axis), *(each.name or "tokens/s" for each in series))
    values = [{point.x: point for point in each.points} for each in series]
    rows = tuple((number(x), *(_cell(points.get(x)) for points in values)) for x in xs)
    caption = "A ring marks the best of a line. The scale begins at 0."
    yield _chart(
        f"Tokens a second over {label(axis)}",
        caption,
        Table(columns, rows),
        lambda width: curves.line_chart(series, x_label=label(axis), y_label="tokens/s", width=width),
    )


def _cell(point: curves.Point | None) -> str:
    if point is None:
        return ABSENT
    return number(point.y) + (f" ({between('y', point.interval)})" if point.interval else "")


def _paired_charts(record: Record) -> Iterator[Chart]:
    effects, floor = readings.effects(record), readings.noise_floor(record)
    if not effects:
        return
    words = [
        "A dot is one prompt." if any(effect.pairs for effect in effects) else "",
        "The diamond is the ratio.",
        "The bar is its interval." if any(effect.interval for effect in effects) else "No interval was recorded.",
        f"The band is the noise floor, {percent(floor)}." if floor else "",
    ]
    columns = ("comparison", "ratio", "interval", "pairs")
    table = Table(columns, strips.effect_rows(effects))
    yield _chart(
        "Paired ratios of speed",
        " ".join(filter(None, words)),
        table,
        lambda width: strips.paired_chart(effects, noise_floor=floor, width=width),
    )


def _session_charts(record: Record) -> Iterator[Chart]:
    for name, rates, spans in readings.sessions(record):
        phase = {index: span.name for span in spans for index in range(span.first, span.last + 1)}
        rows = tuple((number(i), number(rate), phase.get(i, ABSENT)) for i, rate in enumerate(rates, start=1))
        title = "Speed over the session" + (f": {name}" if name else "")
        caption = "A dot is one request; phases are shaded and named. The scale begins at 0."
        table = Table(("request", "tokens/s", "phase"), rows)
        yield _chart(title, caption, table, partial(curves.timeline, rates, spans, y_label="tokens/s"))


def _acceptance_charts(record: Record) -> Iterator[Chart]:
    for name, shares in readings.acceptance_by_position(record):
        rows = tuple((number(index), percent(share)) for index, share in enumerate(shares, start=1))
        title = "Acceptance by position" + (f": {name}" if name else "")
        caption = f"Share of all cycles that kept the draft at each position; 1 + their sum is {1 + sum(shares):.2f}."
        draw = partial(curves.column_chart, shares, x_label="position in the draft", y_label="accepted")
        yield _chart(title, caption, Table(("position", "accepted"), rows), draw)


def _part_charts(record: Record) -> Iterator[Chart]:
    for name, parts in readings.cycle_parts(record):
        rows = tuple((part.name, number(part.ms), *_floor_cells(part)) for part in parts)
        title = "Where a cycle goes" + (f": {name}" if name else "")
        caption = "A bar is time; its dark piece is what reading the bytes takes, and the number that piece's share."
        table = Table(("part", "ms", "floor, ms", "share of the floor"), rows)
        yield _chart(title, caption, table, partial(strips.part_bars, parts))


def _floor_cells(part: strips.Part) -> tuple[str, str]:
    if part.floor_ms is None:
        return ABSENT, ABSENT
    return number(part.floor_ms), percent(part.floor_ms / part.ms)


def tables(record: Record) -> Iterator[tuple[str, Table]]:
    """Latencies, tables inside the summary (phases, rungs) and then all other figures."""
    summaries = record.summaries
    columns = readings.scalar_columns(summaries)
    if len(summaries) == 1:
        summary = summaries[0]
        yield from _latency_table(summary)
        for key, rows in readings.nested_tables(summary):
            yield label(key).capitalize(), _table(rows)
        left = [key for key in columns if not LATENCY.fullmatch(key)]
        rows_of_two = tuple((label(key), shown(key, summary[key])) for key in left)
        yield REST, Table(("figure", "value"), rows_of_two)
    elif summaries:
        yield REST, _table(summaries)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = readings.scalar_columns(rows)
    cells = tuple(tuple(shown(key, row.get(key)) for key in columns) for row in rows)
    return Table(tuple(label(key) for key in columns), cells)


def _latency_table(summary: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    found = {match.groups(): summary[match.group()] for key in summary if (match := LATENCY.fullmatch(key))}
    if not found:
        return
    statistics = list(dict.fromkeys(statistic for statistic, _ in found))
    measures = dict.fromkeys(measure for _, measure in found)
    rows = tuple(
        (label(measure), *(shown("", found.get((statistic, measure))) for statistic in statistics))
        for measure in measures
    )
    yield "Latency, ms", Table(("measure", *statistics), rows)
