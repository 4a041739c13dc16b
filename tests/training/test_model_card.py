"""A card says what config and records say, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.training.model_card import CardFacts, model_card
from tests.training.test_drafter_layouts import DSPARK, ZLAB

CELL = {
    "drafter": "step-2",
    "domain": "code",
    "temperature": 1.0,
    "mean_acceptance_length": 3.25,
    "baseline": "old",
    "difference": 0.5,
    "interval": [0.125, 0.875],
    "confidence": 0.95,
    "num_prompts": 24,
}
SELECTION: dict[str, Any] = {
    "created": "2026-11-02T10:00:00+00:00",
    "workload": {"name": "code", "sha256": "abc"},
    "environment": {"outrider": "0.1.0", "accelerators": [{"name": "NVIDIA H200"}], "packages": {"torch": "2.11"}},
    "arms": [{"name": "old", "drafter_sha256": "s0"}, {"name": "step-2", "drafter_sha256": "s2"}],
    "summary": [CELL, {**CELL, "drafter": "old", "mean_acceptance_length": 9.99, "difference": None, "interval": None}],
}
TRAINING = {
    "recipe": {"name": "tiny", "optimize": {"num_steps": 7}},
    "text": {"num_tokens": 1234, "target_sha256": "t" * 64},
    "num_parameters": 99,
    "num_steps": 7,
    "num_steps_done": 5,
    "train_seconds": 61.4,
    "environment": {"cpu_model": "A CPU", "git": {"commit": "0123456789abcdef"}},
}


def test_figures_are_the_records_and_the_drafters_own() -> None:
    card = model_card(
        replace(ZLAB, embedding_scale=1.0),
        CardFacts(
            layout="vllm",
            licence="gemma",
            target_name="google/gemma-4-31B-it",
            training=TRAINING,
            selection=SELECTION,
            sha256="s2",
        ),
    )
    front = card.split("---\n")[1]
    assert front == ('license: "gemma"\nbase_model: "google/gemma-4-31B-it"\ntags:\n- speculative-decoding\n- dflash\n')
    assert "| code | 1 | 3.250 | +0.500 | +0.125 to +0.875 | 24 |" in card
    assert "9.99" not in card
    assert "NVIDIA H200, Outrider 0.1.0, torch 2.11" in card
    assert "| steps | 5 of 7 |" in card
    assert '"num_steps": 7' in card
    assert "A CPU, commit 0123456789ab" in card
    for line in ("| block | 5 slots; a slot predicts its own position |", "| block embeddings | multiplied by 1 |"):
        assert line in card
    assert "in the `vllm` layout" in card


def test_nothing_is_claimed_where_nothing_was_recorded() -> None:
    card = model_card(DSPARK, CardFacts(layout="deepspec"))
    assert "Not measured: no record was given." in card
    assert "Not recorded: no training_record.json" in card
    assert "Not stated." in card
    assert card.split("---\n")[1] == "tags:\n- speculative-decoding\n- dspark\n"
    assert "| Markov head | vanilla, rank 8 |" in card
    assert not re.search(r"[0-9]\.[0-9]{3}", card)


def test_the_baseline_says_that_it_is_the_baseline() -> None:
    card = model_card(ZLAB, CardFacts(layout="z-lab", selection=SELECTION, sha256="s0"))
    assert "| code | 1 | 9.990 | the baseline itself | – | 24 |" in card


@pytest.mark.parametrize("sha256", ["other", None])
def test_figures_of_another_drafter_are_refused(sha256: str | None) -> None:
    with pytest.raises(ConfigError, match=r"measured old, step-2, none of which is this drafter"):
        model_card(ZLAB, CardFacts(layout="z-lab", selection=SELECTION, sha256=sha256))


def test_half_a_training_record_is_no_fault() -> None:
    card = model_card(ZLAB, CardFacts(layout="z-lab", training={"schema": 1}))
    assert "| steps | not recorded |" in card
    assert "| environment | not recorded |" in card
