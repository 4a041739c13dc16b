"""Memory by part. Seen red: the drafter counted with its target's table, a group of caches left out."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.backends import explain
from outrider.backends.explain import explain_memory
from outrider.engine.engine import EngineConfig
from outrider.errors import ConfigError
from tests.plans import plan_path

GIB = 1 << 30


def explained(
    target: str,
    *,
    drafter: str | None = "auto",
    drafter_quantization: str | None = None,
    gib: float = 141,
    **settings: int,
) -> dict[str, Any]:
    config = EngineConfig(**{"context_length": 8192, "max_seats": 1, **settings})  # type: ignore[arg-type]
    return explain_memory(
        target,
        drafter=drafter,
        drafter_quantization=drafter_quantization,
        config=config,
        gpu_memory_bytes=int(gib * GIB),
        progress=lambda message: None,
    )


def test_parts_come_to_the_whole() -> None:
    found = explained("31b")
    parts = found["parts"]
    assert sum(parts["target"].values()) == found["target_bytes"]
    assert sum(parts["drafter"].values()) == found["drafter_bytes"]
    assert sum(parts["caches"].values()) == found["cache_bytes"]
    whole = ("allocated_bytes", "logits_bytes", "pass_bytes", "graphs_bytes", "reserve_bytes", "left_over_bytes")
    assert sum(found[part] for part in whole) == found["gpu_memory_bytes"]
    assert found["drafter"] == "31b-dflash"
    assert found["fits"]


def test_a_made_up_size_takes_what_its_name_plan_takes() -> None:
    target, drafter = (str(plan_path(name)) for name in ("gemma-4-31B-it", "gemma-4-31B-it-DFlash"))
    of_plan, made_up = explained(target, drafter=drafter), explained("31b")
    assert of_plan["parts"] == made_up["parts"]


def test_more_requests_take_more_caches_until_they_do_not_fit() -> None:
    one, four = explained("31b", gib=80), explained("31b", gib=80, max_seats=4)
    assert four["cache_bytes"] > 3 * one["cache_bytes"]
    assert four["logits_bytes"] == 4 * one["logits_bytes"] == 4 * 16 * 262144 * 4
    assert (one["fits"], explained("31b", gib=80, max_seats=8)["fits"]) == (True, False)
    assert not explained("31b", gib=24)["fits"]


def test_without_a_drafter_nothing_is_kept_for_one() -> None:
    found = explained("tiny", drafter=None, context_length=1024)
    assert (found["drafter"], found["drafter_bytes"], found["parts"]["drafter"]) == (None, 0, {})
    assert not any(name.startswith("drafter") for name in found["parts"]["caches"])
    assert explain.outlined_models("tiny", drafter=None, context_length=64, progress=print).drafter is None


def test_a_quantised_drafter_takes_less_but_brings_a_head_of_its_own() -> None:
    """One byte a number and four a row; or half a byte, and two for 32."""
    plain, int8, int4 = (explained("31b", drafter_quantization=kind) for kind in (None, "int8", "int4"))
    head = 262_144 * 5376
    key = "own embedding and head"
    assert key not in plain["parts"]["drafter"]
    assert int8["parts"]["drafter"][key] == head + 4 * 262_144
    assert int4["parts"]["drafter"][key] == head // 2 + head // 16
    fc = plain["parts"]["drafter"]["projection of taps"]
    assert int8["parts"]["drafter"]["projection of taps"] == fc // 2 + 4 * 5376
    assert int8["target_bytes"] == plain["target_bytes"]


def test_a_quantisation_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of int8, int4"):
        explained("31b", drafter_quantization="fp4")
    with pytest.raises(ConfigError, match="there is no drafter"):
        explained("31b", drafter=None, drafter_quantization="int8")
