from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.benchmarking.report import svg

values = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


def test_an_element_is_escaped() -> None:
    assert svg.element("rect", x=1.0, stroke_width=2.125, class_='a"b') == (
        '<rect x="1" stroke-width="2.12" class="a&quot;b"/>'
    )
    assert "<script>" not in svg.text(0, 0, "<script>")


def test_a_drawing_is_well_formed_and_says_what_it_is() -> None:
    root = ElementTree.fromstring(svg.drawing(350, 20, [svg.line(0, 0, 1, 1, class_="grid")], description="a < b"))
    assert root.attrib["viewBox"] == "0 0 350 20"
    assert root[0].text == "a < b"


def test_a_scale_maps_its_ends_and_survives_no_span() -> None:
    scale = svg.Scale(10, 20, 100, 0)
    assert [scale(10), scale(15), scale(20)] == [100, 50, 0]
    assert svg.Scale(5, 5, 0, 100)(5) == 0


@given(low=values, span=st.floats(min_value=1e-3, max_value=1e6), count=st.integers(2, 8))
def test_ticks_are_even_and_reach_past_both_ends(low: float, span: float, count: int) -> None:
    high = low + span
    ticks = svg.nice_ticks(low, high, count)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step + 1e-9
    assert ticks[-1] >= high - 1e-6 * step - 1e-9
    assert all(after - before == pytest.approx(step, rel=1e-3) for before, after in pairwise(ticks))
    assert len(ticks) <= count + 3


def test_ticks_are_round_numbers() -> None:
    assert svg.nice_ticks(0, 223.9, 4) == [0, 100, 200, 300]
    assert svg.nice_ticks(0, 0, 4)[-1] > 0


@given(places=st.lists(st.floats(min_value=0, max_value=300), min_size=1, max_size=12))
def test_labels_are_spread_in_their_order(places: list[float]) -> None:
    moved = svg.spread(places, 16, last=300)
    assert max(moved) <= 300
    assert all(below - above >= 16 - 1e-9 for above, below in pairwise(sorted(moved)))
    assert svg.spread([10, 40, 90], 16, last=300) == [10, 40, 90]
    order = sorted(range(len(places)), key=places.__getitem__)
    assert sorted(range(len(places)), key=moved.__getitem__) == order


def test_long_text_is_cut_to_its_room() -> None:
    assert svg.fitted("short", 100) == "short"
    assert all(svg.fitted("x" * n, svg.text_width("x" * n) + 14 - 14) == "x" * n for n in range(1, 60))
    cut = svg.fitted("a name that is far too long for its column", 100)
    assert cut.endswith("…")
    assert svg.text_width(cut) <= 100
