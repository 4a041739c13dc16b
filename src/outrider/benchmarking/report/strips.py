"""Charts of one axis: paired differences with their intervals, and the parts of a cycle beside their floors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.benchmarking.report import svg
from outrider.benchmarking.report.wording import between, number, percent, times

MARGIN = 6
DOT_PX = 7  # from one dot of a swarm to the next
SWARM_ROWS = 4
ROOMY_PX = 500  # from this width on, names and values have columns of their own
NAMES_SHARE = 0.38  # of the width, for the column of names


@dataclass(frozen=True)
class Effect:
    """A paired comparison: the ratio of two arms, its interval, and the ratio of every pair (prompt)."""

    name: str
    ratio: float
    interval: tuple[float, float] | None = None
    pairs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Part:
    """Milliseconds a cycle spends on a part, and what reading its bytes takes at the least."""

    name: str
    ms: float
    floor_ms: float | None


def paired_chart(effects: Sequence[Effect], *, noise_floor: float | None, width: int) -> str:
    """A strip an effect: dots are pairs, the diamond the ratio, the bar its interval; the band is the noise floor.

    Names stand at the left of their strips where there is room for that, above them where there is not.
    """
    is_roomy = width >= ROOMY_PX
    x = _ratio_scale(effects, noise_floor, (NAMES_SHARE * width, 0.8 * width) if is_roomy else (20, width - 20))
    heights = [(58 if effect.pairs else 42) if is_roomy else (80 if effect.pairs else 52) for effect in effects]
    bottom = 8 + sum(heights)
    parts = _ratio_axis(x, bottom, noise_floor, num_ticks=4 if is_roomy else 3)
    top = 8.0
    for effect, height in zip(effects, heights, strict=True):
        middle = top + height - 16
        parts += [*_words(effect, middle if is_roomy else top + 10, width), *_strip(effect, x, middle)]
        top += height
    return svg.drawing(width, bottom + 40, parts, description="ratios of paired measurements")


def part_bars(parts: Sequence[Part], *, width: int) -> str:
    """A bar a part, as long as its milliseconds; the dark piece is its floor, the number the floor's share."""
    x = svg.Scale(0, max(part.ms for part in parts), MARGIN, width - 60)
    drawn = []
    for index, part in enumerate(parts):
        top = 8 + 44 * index
        drawn.append(svg.text(MARGIN, top + 12, part.name))
        drawn.append(svg.text(width - MARGIN, top + 12, f"{part.ms:.2f} ms", anchor="end", class_="quiet"))
        drawn.append(_bar(x, part.ms, top + 18, "fill-pale"))
        if part.floor_ms is not None:
            drawn.append(_bar(x, min(part.floor_ms, part.ms), top + 18, "fill-a"))
            share = percent(part.floor_ms / part.ms)
            drawn.append(svg.text(x(part.ms) + 8, top + 29, share, class_="strong ink-a"))
    return svg.drawing(width, 8 + 44 * len(parts), drawn, description="milliseconds a cycle by part, beside floors")


def _bar(x: svg.Scale, ms: float, top: float, class_: str) -> str:
    size = {"width": max(1.0, x(ms) - x(0)), "height": 14, "rx": 2}
    return svg.element("rect", x=x(0), y=top, class_=class_, **size)


def _ratio_scale(effects: Sequence[Effect], noise_floor: float | None, ends: tuple[float, float]) -> svg.Scale:
    values = [1.0, 1 + (noise_floor or 0), 1 / (1 + (noise_floor or 0))]
    for effect in effects:
        values += [effect.ratio, *(effect.interval or ()), *effect.pairs]
    room = 0.04 * (max(values) - min(values)) or 0.05
    return svg.Scale(min(values) - room, max(values) + room, *ends)


def _ratio_axis(x: svg.Scale, bottom: float, noise_floor: float | None, *, num_ticks: int) -> list[str]:
    parts = []
    if noise_floor:
        low, high = x(1 / (1 + noise_floor)), x(1 + noise_floor)
        parts.append(svg.element("rect", x=low, y=8, width=high - low, height=bottom - 8, class_="shade-even"))
    for tick in svg.nice_ticks(x.low, x.high, num_ticks):
        if x.low <= tick <= x.high:
            parts.append(svg.line(x(tick), 8, x(tick), bottom, class_="axis" if tick == 1 else "grid"))
            parts.append(svg.text(x(tick), bottom + 16, f"{tick:g}×", anchor="middle", class_="quiet"))
    one = x(1)
    parts.append(svg.line(one, 8, one, bottom, class_="axis"))
    needed = svg.text_width("← slower")
    if one - x.start > needed:
        parts.append(svg.text(one - 8, bottom + 34, "← slower", anchor="end", class_="quiet"))
    if x.end - one > needed:
        parts.append(svg.text(one + 8, bottom + 34, "faster →", class_="quiet"))
    return parts


def _words(effect: Effect, baseline: float, width: int) -> list[str]:
    """Name and value of a strip; the interval goes under the value where values have a column."""
    is_roomy = width >= ROOMY_PX
    room = NAMES_SHARE * width - 24 if is_roomy else width - 2 * MARGIN - 60
    name = svg.text(MARGIN, baseline + 4, svg.fitted(effect.name, room), class_="" if is_roomy else "halo")
    value = svg.text(width - MARGIN, baseline + 4, times(effect.ratio), anchor="end", class_="strong halo")
    if not effect.interval or not is_roomy:
        return [name, value]
    words = between("ratio", effect.interval)
    return [name, value, svg.text(width - MARGIN, baseline + 18, words, anchor="end", class_="quiet halo")]


def _strip(effect: Effect, x: svg.Scale, middle: float) -> list[str]:
    parts = _swarm(effect.pairs, x, middle - 14)
    if effect.interval:
        low, high = (x(edge) for edge in effect.interval)
        parts.append(svg.element("rect", x=low, y=middle - 3, width=high - low, height=6, rx=3, class_="fill-a half"))
    at = x(effect.ratio)
    corners = f"{at:.1f},{middle - 6} {at + 6:.1f},{middle} {at:.1f},{middle + 6} {at - 6:.1f},{middle}"
    return [*parts, svg.element("polygon", points=corners, class_="fill-a")]


def _swarm(values: Sequence[float], x: svg.Scale, bottom: float) -> list[str]:
    """Dots side by side; those of one place are piled up, and past the pile's height lie over each other."""
    piles: dict[int, int] = {}
    dots = []
    for value in sorted(values):
        place = round(x(value) / DOT_PX)
        row = piles[place] = piles.get(place, -1) + 1
        height = bottom - DOT_PX * (row % SWARM_ROWS)
        dots.append(svg.element("circle", cx=x(value), cy=height, r=3, class_="fill-b half"))
    return dots


def effect_rows(effects: Sequence[Effect]) -> tuple[tuple[str, ...], ...]:
    """The effects as rows of a table: name, ratio, interval, pairs."""
    return tuple(
        (
            effect.name,
            times(effect.ratio),
            between("ratio", effect.interval) if effect.interval else "–",
            number(len(effect.pairs)) if effect.pairs else "–",
        )
        for effect in effects
    )
