"""Where texts part, and how often. Seen red: a shift counted past the first difference, sound pairs left out."""

from __future__ import annotations

import pytest

from outrider.benchmarking.flips import FlipCount, Scored, count_flips, differences, first_difference, largest_shift

SURE = Scored("a", (("a", -0.1), ("b", -2.5)))
CLOSE = Scored("a", (("a", -0.69), ("b", -0.70)))


def test_all_differences_are_found_where_both_read_one_text() -> None:
    found = list(differences([SURE, CLOSE, SURE, CLOSE], ["a", "b", "b", "c"], tolerance=0.02))
    assert [(each.position, each.verdict) for each in found] == [(1, "tie"), (2, "fault"), (3, "fault")]
    assert first_difference([SURE], ["a"], tolerance=0.0) is None
    assert list(differences([], [], tolerance=0.0)) == []


def test_a_reference_of_one_candidate_says_nothing_of_ties() -> None:
    found = first_difference([Scored("a", (("a", -0.1),))], ["b"], tolerance=9.0)
    assert found is not None
    assert (found.verdict, found.gap) == ("fault", None)
    assert "likeliest 'a' -0.1000" in str(found)


def test_exact_ties_are_ties_whichever_was_taken() -> None:
    even = Scored("b", (("a", -0.69), ("b", -0.69)))
    found = first_difference([even], ["a"], tolerance=0.0)
    assert found is not None
    assert found.verdict == "tie"


def test_flips_are_pooled_over_all_that_was_compared() -> None:
    tie, fault = (first_difference([CLOSE], [token], tolerance=0.02) for token in ("b", "c"))
    count = count_flips([(10, None), (4, tie), (6, fault)])
    assert count == FlipCount(num_positions=20, num_ties=1, num_faults=1, largest_gap=pytest.approx(0.01))
    assert count.as_dict()["rate"] == pytest.approx(0.1)
    assert count_flips([]).rate is None


def test_the_shift_is_of_what_both_had_read() -> None:
    moved = Scored("a", (("b", -0.60), ("a", -0.72)))
    assert largest_shift([SURE, CLOSE], [SURE, moved]) == pytest.approx(0.10)
    other = Scored("b", (("b", -0.1), ("a", -9.0)))
    assert largest_shift([SURE, CLOSE, CLOSE], [SURE, other, moved]) == 0.0
    assert largest_shift([], []) == 0.0
