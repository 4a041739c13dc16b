"""Small pieces of SVG: elements, scales and ticks. Colours come from the page's style sheet, by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

CHARACTER_PX = 6.3  # of a 12 px sans serif, on average and a little more


def element(name: str, content: str | None = None, /, **attributes: str | float) -> str:
    """An element with escaped attributes (`class_` is class, `stroke_width` is stroke-width); `content` is markup."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{given}/>" if content is None else f"<{name}{given}>{content}</{name}>"


def text(x: float, y: float, words: str, *, anchor: str = "start", class_: str = "") -> str:
    """Text whose baseline is at y; `anchor` is start, middle or end."""
    classes = {"class_": class_} if class_ else {}
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, **classes)


def line(x1: float, y1: float, x2: float, y2: float, *, class_: str) -> str:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def drawing(width: int, height: float, parts: Sequence[str], *, description: str) -> str:
    """The whole drawing; it shrinks with the page and never grows past its width."""
    inside = element("title", escape(description)) + "".join(parts)
    box = f"0 0 {width} {_value(height)}"
    return element("svg", inside, viewBox=box, role="img", style=f"max-width:{width}px")


def text_width(words: str) -> float:
    """About how many pixels a text takes."""
    return CHARACTER_PX * len(words)


def fitted(words: str, width: float) -> str:
    """The text, cut with an ellipsis where it would be wider than `width` pixels."""
    room = max(1, int(width / CHARACTER_PX + 1e-6))  # a width that was made for the text holds it
    return words if len(words) <= room else words[: room - 1].rstrip() + "…"


@dataclass(frozen=True)
class Scale:
    """Values from low to high to pixels from start to end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) that reach past low and high."""
    rough = (high - low or abs(high) or 1.0) / max(1, count)
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def spread(places: Sequence[float], gap: float, *, last: float) -> list[float]:
    """The same places in their order, moved until each is `gap` below the one above it and none is below `last`."""
    moved = list(places)
    order = sorted(range(len(moved)), key=moved.__getitem__)
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + gap)
    limit = last
    for index in reversed(order):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{round(value, 2):g}"
