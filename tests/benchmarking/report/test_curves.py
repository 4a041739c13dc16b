from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from outrider.benchmarking.report.curves import HEIGHT, Point, Series, Span, column_chart, line_chart, timeline

WIDTHS = (350, 760)


def parsed(drawing: str, kind: str, class_: str) -> list[Element]:
    """Elements of a kind with a class, in order."""
    return [each for each in ElementTree.fromstring(drawing).iter(kind) if class_ in each.get("class", "").split()]


def texts(drawing: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(drawing).iter("text")]


def series(name: str, *values: float) -> Series:
    return Series(name, tuple(Point(x, y) for x, y in enumerate(values)))


def lines(each: list[Series], width: int = 760) -> str:
    return line_chart(each, x_label="n", y_label="tokens/s", width=width)


def test_the_ring_is_on_the_highest_point_and_says_its_value() -> None:
    drawing = lines([series("code", 10, 40, 30)])
    (ring,) = parsed(drawing, "circle", "ring")
    dots = parsed(drawing, "circle", "fill-a")
    assert (ring.get("cx"), ring.get("cy")) == (dots[1].get("cx"), dots[1].get("cy"))
    assert "40" in texts(drawing)


def test_what_a_record_calls_best_is_the_best_though_another_is_higher() -> None:
    points = (Point(0, 40), Point(5, 39, is_best=True), Point(7, 30))
    assert Series("code", points).best.x == 5
    (ring,) = parsed(lines([Series("code", points)]), "circle", "ring")
    assert ring.get("cx") == parsed(lines([Series("code", points)]), "circle", "fill-a")[1].get("cx")


def test_heights_are_in_proportion_from_zero() -> None:
    dots = parsed(lines([series("code", 10, 20, 40)]), "circle", "fill-a")
    axis = parsed(lines([series("code", 10, 20, 40)]), "line", "axis")[0]
    zero = float(axis.get("y1", ""))
    above = [zero - float(dot.get("cy", "")) for dot in dots]
    assert above == pytest.approx([above[2] / 4, above[2] / 2, above[2]], abs=0.05)


def test_an_interval_is_a_bar_from_its_one_end_to_the_other() -> None:
    points = (Point(0, 10), Point(1, 20, (15, 25)))
    drawing = lines([Series("a", points)])
    (bar,) = parsed(drawing, "line", "thin")
    low, high = float(bar.get("y1", "")), float(bar.get("y2", ""))
    (middle,) = [float(dot.get("cy", "")) for dot in parsed(drawing, "circle", "fill-a")[1:]]
    assert low - middle == pytest.approx(middle - high, abs=0.05)
    assert low > high


def test_more_than_three_series_leave_one_that_stands_out() -> None:
    many = [series(f"c{number}", number, 2 * number) for number in (1, 2, 9, 4)]
    drawing = lines(many)
    assert len(parsed(drawing, "polyline", "line-other")) == 3
    assert [each.text for each in parsed(drawing, "text", "ink-a")] == ["18", "c9"]


@pytest.mark.parametrize("width", WIDTHS)
def test_names_stand_apart_and_inside(width: int) -> None:
    close = [series(name, 100, value) for name, value in (("one", 100), ("two", 101), ("three", 100.5))]
    drawing = lines(close, width)
    names = [each for each in ElementTree.fromstring(drawing).iter("text") if each.text in ("one", "two", "three")]
    heights = sorted(float(name.get("y", "")) for name in names)
    assert min(below - above for above, below in pairwise(heights)) >= 15
    assert all(float(name.get("x", "")) < width for name in names)


def test_values_of_two_bests_in_one_place_do_not_overlap() -> None:
    drawing = lines([series("ours", 10, 281), series("peer", 10, 264)])
    ours, peer = (
        float(each.get("y", "")) for each in ElementTree.fromstring(drawing).iter("text") if each.text in ("281", "264")
    )
    assert peer - ours >= 14


def test_columns_are_as_high_as_their_shares() -> None:
    drawing = column_chart([0.8, 0.4, 0.0], x_label="position", y_label="accepted", width=760)
    heights = [float(each.get("height", "")) for each in parsed(drawing, "rect", "fill-a")]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.05)
    assert heights[2] == 1
    assert {"80 %", "40 %", "0 %"} <= set(texts(drawing))


def test_many_columns_stay_inside_a_telephone() -> None:
    drawing = column_chart([0.9**index for index in range(15)], x_label="p", y_label="a", width=350)
    last = parsed(drawing, "rect", "fill-a")[-1]
    assert float(last.get("x", "")) + float(last.get("width", "")) <= 350


def test_degraded_requests_are_marked_and_kinds_named_once() -> None:
    spans = [Span("fast", 1, 2), Span("degraded", 3, 4), Span("fast", 5, 6), Span("degraded", 7, 8)]
    drawing = timeline([220, 221, 60, 61, 222, 219, 62, 60], spans, y_label="tokens/s", width=760)
    slow, fast = (parsed(drawing, "circle", f"fill-{colour}") for colour in "ca")
    assert (len(slow), len(fast)) == (4, 4)
    assert min(float(dot.get("cy", "")) for dot in slow) > max(float(dot.get("cy", "")) for dot in fast)
    assert [each.text for each in parsed(drawing, "text", "strong")] == ["fast", "degraded"]
    shades = [each.get("class") for each in ElementTree.fromstring(drawing).iter("rect")]
    assert shades == ["shade-even", "shade-odd"] * 2


@pytest.mark.parametrize("width", WIDTHS)
def test_phases_lie_over_their_requests_and_names_over_nothing(width: int) -> None:
    spans = [Span("fast", 1, 5), Span("transition", 6, 6), Span("degraded", 7, 9), Span("recovered", 10, 10)]
    drawing = timeline([221, 214, 218, 222, 230, 103, 59, 62, 62, 212], spans, y_label="tokens/s", width=width)
    shades = list(ElementTree.fromstring(drawing).iter("rect"))
    dots = [float(dot.get("cx", "")) for dot in ElementTree.fromstring(drawing).iter("circle")]
    inside = [
        sum(float(s.get("x", "")) < dot < float(s.get("x", "")) + float(s.get("width", "")) for dot in dots)
        for s in shades
    ]
    assert inside == [5, 1, 3, 1]
    names = [(float(t.get("x", "")), float(t.get("y", "")), t.text or "") for t in parsed(drawing, "text", "strong")]
    assert [name for _, _, name in names] == ["fast", "transition", "degraded", "recovered"]
    for index, (left, line, _) in enumerate(names):
        for other_left, other_line, other in names[:index]:
            assert line != other_line or other_left + 6 * len(other) < left
    assert all(left + 6.3 * len(name) <= width for left, _, name in names)


def test_a_request_without_a_speed_leaves_its_place_empty() -> None:
    drawing = timeline([1.0, None, 0.5], [Span("degraded", 3, 3)], y_label="speed", width=350)
    (first,), (third,) = parsed(drawing, "circle", "fill-a"), parsed(drawing, "circle", "fill-c")
    labels = [each for each in ElementTree.fromstring(drawing).iter("text") if each.get("text-anchor") == "middle"]
    assert [first.get("cx"), third.get("cx")] == [labels[0].get("x"), labels[-1].get("x")]


def test_no_phases_and_one_request_are_drawn_too() -> None:
    drawing = timeline([50.0], [], y_label="tokens/s", width=350)
    assert len(parsed(drawing, "circle", "fill-a")) == 1
    assert f" {HEIGHT}" in drawing.split(">", 1)[0]
