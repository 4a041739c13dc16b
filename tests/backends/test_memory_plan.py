"""What fits, what is left, and which settings are named when it does not fit."""

from __future__ import annotations

import pytest
import torch

from outrider.backends.memory_plan import plan_engine_memory, plan_memory, usable_bytes
from outrider.engine.engine import EngineConfig
from outrider.errors import ConfigError
from tests.toy import toy_drafter, toy_target

TARGET = toy_target()
DRAFTER = toy_drafter(TARGET)
CONFIG = EngineConfig(context_length=64, max_seats=2)


def test_everything_is_accounted_for() -> None:
    plan = plan_memory(
        available_bytes=10_000,
        target_bytes=3_000,
        drafter_bytes=1_000,
        drafter_context_bytes=500,
        cache_bytes=2_000,
        max_seats=2,
        max_draft_length=4,
        vocab_size=25,
    )
    assert plan.parts["logits of a cycle"] == 2 * 5 * 25 * 4
    assert plan.most_cache_bytes == 4_500
    names = ("target", "drafter", "drafter context", "logits of a cycle", "keys and values", "left over", "usable")
    assert [line[:20].strip() for line in plan.lines()] == list(names)


def test_a_plan_of_models() -> None:
    plan = plan_engine_memory(TARGET, DRAFTER, CONFIG, available_bytes=10_000_000)
    plain = plan_engine_memory(TARGET, None, CONFIG, available_bytes=10_000_000)
    assert (
        plan.parts["drafter context"] == 2 * 2 * 64 * 2 * 8 * 2 * 8
    )  # seats, layers, tokens, heads, size, k and v, bytes
    assert plan.parts["logits of a cycle"] == 2 * 5 * 96 * 4
    assert plan.parts["drafter"] > 0
    assert (plain.parts["drafter"], plain.parts["drafter context"]) == (0, 0)
    assert plan.cache_bytes == plain.cache_bytes
    assert plan.available_bytes == 10_000_000 + plan.parts["target"] + plan.parts["drafter"]
    assert any("full attention" in line for line in plan.lines())


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"max_seats=2 and context_length=64 do not fit.*Lower max_seats or context"):
        plan_engine_memory(TARGET, DRAFTER, CONFIG, available_bytes=100_000)
    much = EngineConfig(context_length=64, max_seats=2, cache_bytes=20_000_000)
    with pytest.raises(ConfigError, match=r"cache_bytes=20000000 and .*do not fit.*Lower cache_bytes"):
        plan_engine_memory(TARGET, DRAFTER, much, available_bytes=10_000_000)
    little = EngineConfig(context_length=64, max_seats=2, cache_bytes=1_000)
    with pytest.raises(ConfigError, match=r"context_length=64.*one request"):
        plan_engine_memory(TARGET, DRAFTER, little, available_bytes=10_000_000)


def test_a_machine_has_memory() -> None:
    assert usable_bytes(torch.device("cpu")) > 2**20
