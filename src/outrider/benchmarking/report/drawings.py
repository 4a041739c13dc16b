"""Every drawing that a record has the figures for, with its caption and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from outrider.benchmarking.report import curves, readings, strips
from outrider.benchmarking.report.blocks import Chart, Table
from outrider.benchmarking.report.records import Record
from outrider.benchmarking.report.wording import ABSENT, between, brief, label, number, percent, shown

WIDE_PX, NARROW_PX = 760, 350  # what charts are drawn for; the style sheet shows one of the two


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
    rows = tuple((brief(x), *(_cell(points.get(x)) for points in values)) for x in xs)
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
    floor = readings.noise_floor(record)
    yield from _paired_chart("Paired ratios of speed", readings.effects(record), floor)
    yield from _paired_chart("Draft lengths against the best", readings.against_best(record), floor)
    yield from _paired_chart("Tokens a cycle is worth, against the baseline", readings.against_baseline(record), None)


def _paired_chart(title: str, effects: Sequence[strips.Effect], floor: float | None) -> Iterator[Chart]:
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
        title,
        " ".join(filter(None, words)),
        table,
        lambda width: strips.paired_chart(effects, noise_floor=floor, width=width),
    )


def _session_charts(record: Record) -> Iterator[Chart]:
    for session in readings.sessions(record):
        phase = {index: span.name for span in session.spans for index in range(span.first, span.last + 1)}
        rates = enumerate(session.rates, start=1)
        rows = tuple((number(i), shown("", rate), phase.get(i, ABSENT)) for i, rate in rates)
        title = "Speed over the session" + (f": {session.name}" if session.name else "")
        caption = "A dot is one request; phases are shaded and named. The scale begins at 0."
        table = Table(("request", session.unit, "phase"), rows)
        draw = partial(curves.timeline, session.rates, session.spans, y_label=session.unit)
        yield _chart(title, caption, table, draw)


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
