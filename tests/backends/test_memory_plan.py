"""What fits, what is left, and which setting is named when it does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.backends.memory_plan import plan_engine_memory, plan_memory, usable_bytes
from outrider.engine.engine import EngineConfig
from outrider.errors import ConfigError
from tests.toy import toy_drafter, toy_target

SIZES: dict[str, Any] = {
    "available_bytes": 10_000,
    "target_bytes": 3_000,
    "drafter_bytes": 1_000,
    "drafter_context_bytes": 500,
    "bytes_per_seat": 1_000,
    "max_seats": 2,
    "max_draft_length": 4,
    "vocab_size": 25,
    "context_length": 64,
}


def test_everything_is_accounted_for() -> None:
    plan = plan_memory(**SIZES)
    assert plan.parts["logits of a cycle"] == 2 * 5 * 25 * 4
    assert (plan.cache_bytes, plan.needed_cache_bytes, plan.most_cache_bytes) == (2_000, 2_000, 4_500)
    assert plan_memory(**SIZES, cache_bytes=4_500).cache_bytes == 4_500
    text = "\n".join(plan_memory(**SIZES, cache_bytes=4_500).lines())
    assert all(word in text for word in ("target", "drafter", "logits", "keys and values", "prefixes", "usable"))
    assert len(plan.lines()) == 8


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"cache_bytes": 4_501}, r"cache_bytes=4501 does not fit.*4,500.*Lower cache_bytes"),
        ({"cache_bytes": 999}, r"cache_bytes=999 is less.*Raise cache_bytes"),
        ({"max_seats": 4}, r"max_seats=4 does not fit.*Lower max_seats"),
        ({"bytes_per_seat": 4_501}, r"context_length=64 does not fit.*Lower context_length"),
        ({"target_bytes": 9_000}, r"context_length=64 does not fit: .*there are 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plan_memory(**{**SIZES, **changes})


def test_a_plan_of_models() -> None:
    target = toy_target()
    drafter = toy_drafter(target)
    config = EngineConfig(context_length=64, max_seats=2)
    plan = plan_engine_memory(target, drafter, config, available_bytes=10_000_000)
    plain = plan_engine_memory(target, None, config, available_bytes=10_000_000)
    keys_and_values = 2 * 8  # bytes of a float64 pair
    assert plan.parts["drafter context"] == 2 * 2 * 64 * 2 * 8 * keys_and_values  # seats, layers, tokens, heads, size
    assert plan.parts["logits of a cycle"] == 2 * 5 * 96 * 4
    assert plan.parts["drafter"] > 0
    assert (plain.parts["drafter"], plain.parts["drafter context"]) == (0, 0)
    assert plan.cache_bytes == plain.cache_bytes
    assert plan.available_bytes == 10_000_000 + plan.parts["target"] + plan.parts["drafter"]


def test_a_machine_has_memory() -> None:
    assert usable_bytes(torch.device("cpu")) > 2**20
