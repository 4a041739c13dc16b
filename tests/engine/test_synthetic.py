"""Synthetic acceptance: the counts that were asked for, the same in every engine, and marked wherever text comes out.

Seen red: rates taken for conditional ones; the fraction of a length rounded; counts that ignore the position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.core import SamplingParams
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.synthetic import kept_counts, synthetic_rates
from outrider.errors import ConfigError, RequestError
from outrider.metrics import mean_acceptance_length
from tests.cases.common import toy_proposer
from tests.scripted import make_test_engine
from tests.statistics import assert_chi_square
from tests.toy import toy_drafter, toy_target

TARGET = toy_target()
RATES = (0.9, 0.6, 0.6, 0.25)
GREEDY = SamplingParams(max_tokens=24)
PROMPTS = ([5, 17, 80], [3], [44, 9, 61])


def make_engine(**settings: Any) -> Engine:
    return make_test_engine(TARGET, toy_proposer(toy_drafter(TARGET), num_seats=3), max_seats=3, **settings)


def run(engine: Engine, params: SamplingParams = GREEDY) -> list[Any]:
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
    assert all(request.is_synthetic for request in requests)
    return [(request.output_token_ids, request.acceptance) for request in requests]


def test_counts_follow_the_unconditional_rates() -> None:
    counts = kept_counts(RATES, seed=3, first_position=10, num_positions=20_000)
    kept = [1.0, *RATES, 0.0]
    assert_chi_square(counts, {n: kept[n] - kept[n + 1] for n in range(5) if kept[n] > kept[n + 1]})


def test_a_length_is_ones_and_one_fraction() -> None:
    assert synthetic_rates(3.25, None, draft_length=4) == (1.0, 1.0, 0.25, 0.0)
    assert synthetic_rates(1, None, draft_length=2) == (0.0, 0.0)
    assert synthetic_rates(3, None, draft_length=2) == (1.0, 1.0)
    assert synthetic_rates(None, None, draft_length=2) is None
    counts = kept_counts((1.0, 1.0, 0.25, 0.0), seed=0, first_position=0, num_positions=8000)
    assert set(counts) == {2, 3}
    assert sum(counts) / len(counts) == pytest.approx(2.25, abs=0.02)


def test_noise_depends_on_seed_and_position() -> None:
    counts = kept_counts(RATES, seed=3, first_position=0, num_positions=200)
    assert kept_counts(RATES, seed=3, first_position=50, num_positions=20) == counts[50:70]
    assert kept_counts(RATES, seed=4, first_position=0, num_positions=200) != counts


@pytest.mark.parametrize("settings", [{"synthetic_acceptance_rates": RATES}, {"synthetic_acceptance_length": 3.5}])
def test_a_captured_cycle_keeps_the_same_drafts(settings: dict[str, Any]) -> None:
    expected, engine = run(make_engine(**settings)), make_engine(**settings)
    engine.use_device_cycle()
    assert run(engine) == expected
    assert run(make_engine(**settings), replace(GREEDY, logprobs=0)) == expected  # judged by logits


def test_a_cycle_is_worth_the_length_asked_for() -> None:
    for length in (1.0, 2.0, 5.0):
        for _, acceptance in run(make_engine(synthetic_acceptance_length=length)):
            mean = mean_acceptance_length(acceptance)
            assert mean is not None
            assert length - 0.5 <= mean <= length  # the last cycle of an answer drafts less


def test_kept_drafts_are_the_text() -> None:
    engine = make_test_engine(TARGET, max_seats=3)
    plain = engine.add(PROMPTS[0], GREEDY)
    while engine.has_work:
        engine.step()
    assert not plain.is_synthetic
    assert run(make_engine(synthetic_acceptance_length=5.0))[0][0] != plain.output_token_ids
    assert run(make_engine(synthetic_acceptance_length=1.0))[0][0] == plain.output_token_ids


def test_plain_requests_and_engines_are_real() -> None:
    engine = make_engine(synthetic_acceptance_length=4)
    request = engine.add(PROMPTS[0], replace(GREEDY, num_speculative_tokens=0))
    assert not request.is_synthetic
    assert not make_test_engine(TARGET, synthetic_acceptance_length=9).add(PROMPTS[0], GREEDY).is_synthetic


def test_sampled_requests_are_refused() -> None:
    with pytest.raises(RequestError, match=r"temperature=1\.0.*greedy"):
        make_engine(synthetic_acceptance_length=4).add(PROMPTS[0], SamplingParams(temperature=1.0))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": RATES}, "exclude each other"),
        ({"synthetic_acceptance_length": 0.5}, r"length=0\.5 is not a number of at least 1"),
        ({"synthetic_acceptance_length": "3"}, "length='3' is not"),
        ({"synthetic_acceptance_length": float("nan")}, "length=nan is not"),
        ({"synthetic_acceptance_rates": (0.5, 0.6)}, "rises"),
        ({"synthetic_acceptance_rates": (1.5,)}, "from 0 to 1"),
        ({"synthetic_acceptance_rates": ()}, "from 0 to 1"),
        ({"synthetic_acceptance_rates": 0.5}, "from 0 to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"synthetic_acceptance_length": 5.5}, "more than the 5 tokens"),
        ({"synthetic_acceptance_rates": (0.5, 0.4)}, "2 entries, but 4 tokens"),
        ({"synthetic_acceptance_length": 4, "num_speculative_tokens": 2}, "more than the 3 tokens"),
    ],
)
def test_settings_that_do_not_fit_the_drafter_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_engine(**settings)
