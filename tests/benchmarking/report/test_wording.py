from __future__ import annotations

from typing import Any

import pytest

from outrider.benchmarking.report.wording import between, brief, label, number, percent, shown, times, title_of


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("num_output_tokens", "output tokens"),
        ("plain_tokens_per_s", "plain tokens/s"),
        ("tokens_per_s", "tokens/s"),
        ("read_tb_per_s", "read TB/s"),
        ("requests_per_s", "requests/s"),
        ("plain_prefill_s", "plain prefill, s"),
        ("gap_p50_us", "gap p50, µs"),
        ("p99_ttft_ms", "time to first token, p99 ms"),
        ("mean_acceptance_length", "acceptance length"),
        ("verdict", "verdict"),
    ],
)
def test_identifiers_become_words_with_units(key: str, words: str) -> None:
    assert label(key) == words


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("x", None, "–"),
        ("x", True, "yes"),
        ("x", False, "no"),
        ("x", 3072, "3,072"),
        ("x", 95.16, "95.16"),
        ("x", 4.0, "4.00"),
        ("x", 0.0, "0"),
        ("x", 0.1234, "0.123"),
        ("x", 0.00001234, "1.2e-05"),
        ("x", 1234.5, "1,234"),
        ("x", [1, 2.5], "1, 2.50"),
        ("x", [], "none"),
        ("x", {"num_rounds": 3}, "rounds 3"),
        ("x", "text", "text"),
        ("speedup", 1.6263, "1.63×"),
        ("floor_share", 0.844, "84.4 %"),
        ("speed_retention", 1.0, "100 %"),
    ],
)
def test_values_are_shown_by_their_key(key: str, value: Any, words: str) -> None:
    assert shown(key, value) == words


def test_a_ratio_near_one_has_a_third_decimal() -> None:
    assert [times(value) for value in (0.5, 0.949, 1.0, 1.007, 1.3)] == ["0.50×", "0.949×", "1.00×", "1.007×", "1.30×"]


def test_shares_lose_no_tenth_that_matters() -> None:
    assert [percent(value) for value in (0.986, 0.5, 1.0, 0.9996, 0.015)] == [
        "98.6 %",
        "50 %",
        "100 %",
        "100 %",
        "1.5 %",
    ]


def test_labels_in_drawings_are_brief() -> None:
    assert [brief(value) for value in (223.9, 95.16, 90.0, 1.234)] == ["224", "95.2", "90", "1.23"]
    assert number(223.9) == "223.90"


def test_intervals_and_titles() -> None:
    assert between("speedup", (1.5, 1.7)) == "1.50× to 1.70×"
    assert between("ratio", (0.7, 0.853)) == "0.700× to 0.853×"
    assert between("tokens_per_s", (80, 95.5)) == "80 to 95.50"
    assert title_of("bench-sweep") == title_of("sweep") == "Which settings are fastest"
    assert title_of("never-seen_before") == "never seen before"
