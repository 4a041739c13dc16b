"""Charts with both axes: speed over a setting, acceptance by position, speed over the requests of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.benchmarking.report import svg
from outrider.benchmarking.report.wording import brief, percent

HEIGHT, TOP, BOTTOM, LEFT = 260, 30, 40, 40
NUM_COLOURS = 3
LABEL_GAP_PX = 16
OTHER = "other"  # the colour of series that only give a background
SLOW_PHASE = "degraded"


@dataclass(frozen=True)
class Point:
    """One cell: what was set, what came out, and the interval around it where one was measured."""

    x: float
    y: float
    interval: tuple[float, float] | None = None
    is_best: bool = False
    """Said by the record, which may have compared more closely than by these heights."""


@dataclass(frozen=True)
class Series:
    """Points in order of x, with the name that stands beside their line."""

    name: str
    points: tuple[Point, ...]

    @property
    def best(self) -> Point:
        """The point that its record calls the best, else the highest."""
        return max(self.points, key=lambda point: (point.is_best, point.y))


@dataclass(frozen=True)
class Span:
    """A phase of a session: requests first to last, counted from 1, and what it is called."""

    name: str
    first: int
    last: int


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, width: int) -> str:
    """A line a series, named at its end, its best point marked with its value; y starts at 0, intervals are bars."""
    points = [point for each in series for point in each.points]
    names_px = min(max(svg.text_width(each.name) for each in series) + 14, 0.3 * width)
    xs = sorted({point.x for point in points})
    x = svg.Scale(xs[0], xs[-1], LEFT + 12, width - names_px - 4)
    y = _from_zero([point.interval[1] if point.interval else point.y for point in points])
    parts = [*_y_axis(y, width - names_px, y_label), *_x_axis(x, _apart(x, xs), x_label)]
    taken: list[tuple[float, float]] = []
    places = svg.spread([y(each.points[-1].y) for each in series], LABEL_GAP_PX, last=y(0))
    for each, place, colour in zip(series, places, _colours(series), strict=True):
        parts += _line(each, x, y, colour)
        if colour != OTHER:
            parts += _best(each, x, y, colour, taken)
        name = svg.fitted(each.name, names_px - 14)
        parts.append(svg.text(width - names_px + 10, place + 4, name, class_=f"ink-{colour}"))
    return svg.drawing(width, HEIGHT, parts, description=f"{y_label} over {x_label}")


def column_chart(shares: Sequence[float], *, x_label: str, y_label: str, width: int) -> str:
    """A column a position, counted from 1, with its share on top."""
    y = svg.Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    slot = min((width - LEFT - 16) / len(shares), 88.0)
    parts = _y_axis(y, LEFT + 12 + slot * len(shares), y_label, ticks=(0, 0.5, 1), words=percent)
    for index, share in enumerate(shares):
        left, middle = LEFT + 12 + slot * index, LEFT + 12 + slot * (index + 0.5)
        size = {"width": slot * 0.72, "height": max(1.0, y(0) - y(share)), "rx": 2}
        parts.append(svg.element("rect", x=left + slot * 0.14, y=y(share), class_="fill-a", **size))
        words = percent(share) if slot >= 44 else f"{100 * share:.0f}"
        parts += [svg.text(middle, y(share) - 7, words, anchor="middle", class_="strong")]
        parts += [svg.text(middle, y(0) + 18, str(index + 1), anchor="middle", class_="quiet")]
    parts.append(svg.text(LEFT + 12, HEIGHT - 4, x_label, class_="quiet"))
    return svg.drawing(width, HEIGHT, parts, description=f"{y_label} by {x_label}")


def timeline(rates: Sequence[float | None], spans: Sequence[Span], *, y_label: str, width: int) -> str:
    """A dot a request over its phases, which are shaded; each kind is named where it first occurs; y starts at 0.

    A request without a speed leaves its place empty.
    """
    slot = (width - LEFT - 8) / max(1, len(rates))
    left = svg.Scale(0, 1, LEFT + 4, LEFT + 4 + slot)  # of request i at i, its middle at i + 0.5
    kinds = {span.name: span for span in reversed(spans)}  # the first of each
    names, num_lines = _phase_names(list(reversed(kinds.values())), left, right=width - 4.0)
    known = [(index, rate) for index, rate in enumerate(rates) if rate is not None]
    y = _from_zero([rate for _, rate in known], top=TOP + 4 + LABEL_GAP_PX * num_lines)
    order = list(reversed(kinds))
    parts = [_shade(span, left, y(0), is_dark=order.index(span.name) % 2 == 0) for span in spans]
    parts += [*_y_axis(y, width, y_label), *names]
    slow = {index for span in spans if span.name == SLOW_PHASE for index in range(span.first - 1, span.last)}
    middles = [(left(index + 0.5), y(rate)) for index, rate in known]
    parts.append(svg.element("polyline", points=_path(middles), class_="line-other thin"))
    for (index, _), (px, py) in zip(known, middles, strict=True):
        colour = "c" if index in slow else "a"
        parts.append(svg.element("circle", cx=px, cy=py, r=min(4.5, slot * 0.4), class_=f"fill-{colour}"))
    shown = range(0, len(rates), max(1, round(34 / slot)))
    parts += [svg.text(left(i + 0.5), y(0) + 18, str(i + 1), anchor="middle", class_="quiet") for i in shown]
    parts.append(svg.text(LEFT + 4, HEIGHT - 4, "request", class_="quiet"))
    return svg.drawing(width, HEIGHT, parts, description=f"{y_label} by request")


def _shade(span: Span, left: svg.Scale, bottom: float, *, is_dark: bool) -> str:
    edges = left(span.first - 1), left(span.last)
    size = {"width": edges[1] - edges[0], "height": bottom - TOP}
    return svg.element("rect", x=edges[0], y=TOP, class_="shade-even" if is_dark else "shade-odd", **size)


def _phase_names(spans: Sequence[Span], left: svg.Scale, *, right: float) -> tuple[list[str], int]:
    """Each span's name at its beginning, on the first line where it runs into no other, and the number of lines."""
    ends: list[float] = []
    parts = []
    for span in spans:
        needed = svg.text_width(span.name) + 12
        start = min(left(span.first - 1) + 5, right - needed)
        row = next((index for index, end in enumerate(ends) if end <= start), len(ends))
        ends[row : row + 1] = [start + needed]
        parts.append(svg.text(start, TOP + 14 + LABEL_GAP_PX * row, span.name, class_="strong"))
    return parts, len(ends)


def _from_zero(values: Sequence[float], *, top: float = TOP) -> svg.Scale:
    return svg.Scale(0.0, svg.nice_ticks(0, max(values), 4)[-1], HEIGHT - BOTTOM, top)


def _y_axis(
    y: svg.Scale,
    right: float,
    y_label: str,
    *,
    ticks: Sequence[float] = (),
    words: Callable[[float], str] = brief,
) -> list[str]:
    parts = [svg.text(0, 12, y_label, class_="quiet")]
    for tick in ticks or svg.nice_ticks(y.low, y.high, 4):
        parts.append(svg.line(LEFT, y(tick), right, y(tick), class_="axis" if tick == 0 else "grid"))
        parts.append(svg.text(LEFT - 6, y(tick) + 4, words(tick), anchor="end", class_="quiet"))
    return parts


def _x_axis(x: svg.Scale, ticks: Sequence[float], x_label: str) -> list[str]:
    marks = [svg.text(x(tick), HEIGHT - BOTTOM + 18, brief(tick), anchor="middle", class_="quiet") for tick in ticks]
    return [*marks, svg.text(LEFT, HEIGHT - 4, x_label, class_="quiet")]


def _apart(x: svg.Scale, ticks: Sequence[float]) -> list[float]:
    """Those of the ticks whose numbers do not run into the one before."""
    kept: list[float] = []
    for tick in ticks:
        needed = (svg.text_width(brief(tick)) + svg.text_width(brief(kept[-1]))) / 2 + 6 if kept else 0
        if not kept or x(tick) - x(kept[-1]) >= needed:
            kept.append(tick)
    return kept


def _colours(series: Sequence[Series]) -> list[str]:
    """A colour each for up to three series; of more, the one that reaches highest stands out of grey ones."""
    if len(series) <= NUM_COLOURS:
        return list("abc"[: len(series)])
    top = max(series, key=lambda each: each.best.y)
    return ["a" if each is top else OTHER for each in series]


def _line(series: Series, x: svg.Scale, y: svg.Scale, colour: str) -> list[str]:
    places = [(x(point.x), y(point.y)) for point in series.points]
    parts = [svg.element("polyline", points=_path(places), class_=f"line-{colour}")]
    for point, (px, py) in zip(series.points, places, strict=True):
        if point.interval:
            parts.append(svg.line(px, y(point.interval[0]), px, y(point.interval[1]), class_=f"line-{colour} thin"))
        parts.append(svg.element("circle", cx=px, cy=py, r=3, class_=f"fill-{colour}"))
    return parts


def _best(series: Series, x: svg.Scale, y: svg.Scale, colour: str, taken: list[tuple[float, float]]) -> list[str]:
    """The ring and value of the best point: above it, or below it where another value stands in the way."""
    best = series.best
    middle, height = x(best.x), y(best.interval[1] if best.interval else best.y) - 10
    if any(abs(middle - px) < 34 and abs(height - py) < 30 for px, py in taken):
        height = y(best.interval[0] if best.interval else best.y) + 20
    taken.append((middle, height))
    ring = svg.element("circle", cx=middle, cy=y(best.y), r=6, class_=f"line-{colour} ring")
    return [ring, svg.text(middle, height, brief(best.y), anchor="middle", class_=f"ink-{colour} strong halo")]


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
