"""Broken answers and settings. Seen red: eight words again and again passed, a refrain flagged, settings unheeded."""

from __future__ import annotations

import pytest

from outrider.benchmarking.answer_quality import quality_flag, setting_faults, text_faults
from outrider.benchmarking.workloads import DEMO

ESSAY = (
    "The first bridges were trees that had fallen over a stream. Romans built arches of stone, whose weight holds them "
    "together, and a few of them still carry traffic today. In the middle ages towns paid for theirs with tolls, "
    "houses and even mills on the piers. Iron came next: Coalbrookdale has the oldest one, opened in 1781."
)


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("ha ha ha ha ha ha", None),
        ("and " * 200, "loop"),
        ("The the THE, the " * 20, "loop"),
        ("the cat sat on the mat and slept. " * 10, "loop"),
        ("the cat sat on the mat and slept. " * 2, None),
        ("长江是亚洲最长的河流" * 10, "loop"),
        *((prompt, None) for prompt in DEMO.prompts),
    ],
)
def test_flags(text: str, flag: str | None) -> None:
    assert quality_flag(text) == flag


def test_a_tool_call_is_an_answer() -> None:
    assert quality_flag("", ({"name": "look_up"},)) is None


def test_only_settings_that_both_sides_name_are_held_against_each_other() -> None:
    assert setting_faults({"drafting": True, "top_k": None}, {"drafting": True, "top_k": 3, "seed": 1}) == []
    assert setting_faults({"drafting": True}, {}) == []
    assert setting_faults({"temperature": 0.7}, {"temperature": 0.0}) == [
        "temperature was asked to be 0.7, but the server says 0.0"
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (ESSAY, None),
        (" ... ", "empty"),
        (f"{ESSAY} <|tool_call>", "markup"),
        ("Yes, it is so.\n" * 5 + ESSAY, "5 times in a row"),
        ("and " * 200, "different ones"),
        ((ESSAY + " and then the old story of the bridge begins again and again. ") * 5, "different ones"),
        (ESSAY * 4, "mostly repeats itself"),
        (ESSAY + " so it was told to me by my father" * 12, "stands there"),
    ],
)
def test_faults_of_long_text(text: str, fault: str | None) -> None:
    found = " ".join(text_faults(text))
    assert (fault in found) if fault else not found
