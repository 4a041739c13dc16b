"""The nouns: what sampling parameters refuse, and what acceptance counts count."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outrider.core import GREEDY_TEMPERATURE, MAX_LOGPROBS, MAX_STOP_STRINGS, AcceptanceStats, Grammar, SamplingParams
from outrider.errors import RequestError


def test_defaults_are_greedy_and_unlimited() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert params.max_tokens is None
    assert params.num_speculative_tokens is None


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0, "top_p": 1.0, "min_p": 1.0, "top_k": 0},
        {"temperature": 2.0, "top_p": 1e-6, "top_k": 262_144, "seed": -1},
        {"max_tokens": 1, "num_speculative_tokens": 0, "seed": 2**63 - 1},
        {"stop_strings": ["\n\n"], "stop_token_ids": [0, 106]},
        {"allowed_token_ids": [0, 3], "bad_words": ["a b"], "min_tokens": 2, "max_tokens": 2, "logprobs": 0},
        {"logit_bias": {0: -100, 5: 100.0}, "presence_penalty": -2.0, "frequency_penalty": 2, "logprobs": MAX_LOGPROBS},
        {"repetition_penalty": 0.01},
    ],
)
def test_values_that_mean_something_are_taken(values: dict[str, Any]) -> None:
    assert replace(SamplingParams(**values)) == SamplingParams(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("top_k", -1),
        ("top_k", 2.0),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("num_speculative_tokens", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop_strings", "one string"),
        ("stop_strings", ("",)),
        ("stop_strings", tuple("ab" * MAX_STOP_STRINGS)),
        ("stop_token_ids", (-1,)),
        ("shown_token_ids", (-1,)),
        ("shown_token_ids", 5),
        ("grammar", "[a]"),
        ("stop_strings", None),
        ("stop_strings", 5),
        ("stop_token_ids", None),
        ("stop_token_ids", 5),
        ("bad_words", "one word"),
        ("bad_words", (" ",)),
        ("bad_words", ([2, 2],)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", 5),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"5": 0.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", [(5, 1.0)]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", True),
    ],
)
def test_silly_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert SamplingParams(temperature=GREEDY_TEMPERATURE).is_greedy
    assert not SamplingParams(temperature=2 * GREEDY_TEMPERATURE).is_greedy


def test_lists_of_stops_become_tuples() -> None:
    assert SamplingParams(stop_strings=["a", "b"]).stop_strings == ("a", "b")  # type: ignore[arg-type]


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens=3 is more than max_tokens=2"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_params_keep_a_copy_of_the_bias_and_can_be_hashed() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[6] = 2.0
    assert params.logit_bias == {5: 1.0}
    assert hash(params) == hash(replace(params))
    assert params != SamplingParams()


def test_acceptance_counts_add_up() -> None:
    stats = AcceptanceStats()
    for draft_length, num_accepted_tokens in ((3, 3), (3, 0), (0, 0)):
        stats.record_cycle(draft_length=draft_length, num_accepted_tokens=num_accepted_tokens)
    assert stats == AcceptanceStats(3, 6, 3, {3: 1, 0: 2})


@pytest.mark.parametrize(
    ("kind", "text", "says"), [("xml", "", "kind 'xml' is not known"), ("regex", 3, "text is not")]
)
def test_grammars_that_are_none(kind: str, text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Grammar(kind, text)
    with pytest.raises(RequestError, match="at most 100000 characters"):
        Grammar("regex", "a" * 100_001)
