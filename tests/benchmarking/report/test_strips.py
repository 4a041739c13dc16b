from __future__ import annotations

from xml.etree import ElementTree

import pytest

from outrider.benchmarking.report.strips import Effect, Part, effect_rows, paired_chart, part_bars
from tests.benchmarking.report.test_curves import WIDTHS, parsed, texts


def middles(drawing: str) -> list[float]:
    """Where the diamonds are."""
    found = parsed(drawing, "polygon", "fill-a")
    return [float(each.get("points", "").split(",")[0]) for each in found]


@pytest.mark.parametrize("width", WIDTHS)
def test_ratios_lie_in_their_order_around_one(width: int) -> None:
    drawing = paired_chart([Effect("a", 0.9), Effect("b", 1.0), Effect("c", 1.4)], noise_floor=None, width=width)
    slower, equal, faster = middles(drawing)
    one = float(parsed(drawing, "line", "axis")[-1].get("x1", ""))
    assert equal == pytest.approx(one, abs=0.06)
    assert 0 < slower < equal < faster < width
    assert (faster - equal) / (equal - slower) == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("width", WIDTHS)
def test_interval_pairs_and_noise_floor_are_drawn_to_scale(width: int) -> None:
    effect = Effect("a", 1.5, (1.4, 1.6), (1.2, 1.5, 1.8))
    drawing = paired_chart([effect], noise_floor=0.25, width=width)
    (bar,) = parsed(drawing, "rect", "half")
    left, right = float(bar.get("x", "")), float(bar.get("x", "")) + float(bar.get("width", ""))
    assert (left + right) / 2 == pytest.approx(middles(drawing)[0], abs=0.1)
    dots = [float(dot.get("cx", "")) for dot in parsed(drawing, "circle", "fill-b")]
    assert (dots[2] - dots[0]) / (right - left) == pytest.approx(3, rel=0.01)
    (band,) = parsed(drawing, "rect", "shade-even")
    assert float(band.get("width", "")) / (right - left) == pytest.approx((1.25 - 0.8) / 0.2, rel=0.01)


def test_a_side_without_room_has_no_arrow_either() -> None:
    both = paired_chart([Effect("a", 0.5), Effect("b", 1.5)], noise_floor=None, width=WIDTHS[-1])
    faster = paired_chart([Effect("a", 1.2), Effect("b", 2.5)], noise_floor=None, width=WIDTHS[-1])
    assert [text for text in texts(both) if "←" in text or "→" in text] == ["← slower", "faster →"]
    assert [text for text in texts(faster) if "←" in text or "→" in text] == ["faster →"]


def test_every_pair_is_a_dot_however_close() -> None:
    drawing = paired_chart([Effect("a", 1.5, None, (1.5,) * 40)], noise_floor=None, width=350)
    dots = parsed(drawing, "circle", "fill-b")
    assert len(dots) == 40
    assert len({dot.get("cy") for dot in dots}) == 4
    assert all(0 < float(dot.get("cy", "")) < 80 for dot in dots)


def test_the_interval_is_written_where_there_is_room() -> None:
    effect = Effect("drafter over plain", 1.5, (1.4, 1.6))
    assert "1.40× to 1.60×" in texts(paired_chart([effect], noise_floor=None, width=760))
    assert effect_rows([effect]) == (("drafter over plain", "1.50×", "1.40× to 1.60×", "–"),)


def test_parts_are_as_long_as_their_time_and_dark_as_far_as_their_floor() -> None:
    drawing = part_bars([Part("products", 10.0, 8.0), Part("other", 5.0, None)], width=760)
    pale = [float(each.get("width", "")) for each in parsed(drawing, "rect", "fill-pale")]
    dark = [float(each.get("width", "")) for each in parsed(drawing, "rect", "fill-a")]
    assert pale[0] == pytest.approx(2 * pale[1], abs=0.05)
    assert dark == pytest.approx([0.8 * pale[0]], abs=0.05)
    assert {"80 %", "10.00 ms", "products", "other"} <= set(texts(drawing))


def test_a_floor_above_the_time_does_not_leave_its_bar() -> None:
    drawing = part_bars([Part("head", 1.0, 1.1)], width=350)
    assert parsed(drawing, "rect", "fill-a")[0].get("width") == parsed(drawing, "rect", "fill-pale")[0].get("width")
    assert ElementTree.fromstring(drawing).get("role") == "img"
