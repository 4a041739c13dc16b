"""T-056 on a GPU: an engine at full load stays within its plan, and the plan asks for little more.

A shrunken Gemma 4 31B with its whole vocabulary and a DFlash drafter, half a gigabyte of made-up weights. All seats
hold the longest text there can be, prompts come in passes of 2,048 rows, drafts are the longest.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from outrider.backends import dummy_configs
from outrider.backends.dummy import Models, build_dummy
from outrider.backends.local import make_engine, resolve_config
from outrider.backends.memory_plan import MemoryPlan, plan_engine_memory, usable_bytes
from outrider.core import SamplingParams
from outrider.engine.engine import Engine, EngineConfig
from outrider.kernels.ops import select_kernels

pytestmark = pytest.mark.gpu
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
CONTEXT_LENGTH, MAX_SEATS, MAX_DRAFTS, NUM_TOKENS = 8192, 4, 15, 64
TARGET: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
}
DRAFTER: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "target_layer_ids": (1, 5, 9),
}


def allocated_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def pool_bytes(engine: Engine) -> int:
    """What the pool of captured graphs has taken from the device."""
    assert engine.device_cycle is not None
    pool = tuple(engine.device_cycle.graphs._pool)
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == pool)


def run_full_load(engine: Engine, **sampling: Any) -> None:
    """Prompts that share no prefix; after their last tokens no seat has room for more."""
    num_prompt = CONTEXT_LENGTH - NUM_TOKENS
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, num_speculative_tokens=MAX_DRAFTS, **sampling)
    requests = [
        engine.add([(7919 * at + 131 * seat) % 200_000 + 2 for at in range(num_prompt)], params)
        for seat in range(MAX_SEATS)
    ]
    most_running = 0
    while engine.has_work:
        engine.step()
        most_running = max(most_running, len(engine.scheduler.running))
    assert [(request.error, len(request.output_token_ids)) for request in requests] == [(None, NUM_TOKENS)] * MAX_SEATS
    assert engine.drafter_fault is None
    assert most_running == MAX_SEATS


def planned(models: Models, config: EngineConfig) -> MemoryPlan:
    return plan_engine_memory(models.target, models.drafter, config, available_bytes=usable_bytes(CUDA))


def test_t056_a_full_load_stays_within_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dummy_configs._TARGETS, "shrunken", TARGET)
    monkeypatch.setitem(dummy_configs._DRAFTERS, "shrunken", DRAFTER)
    gc.collect()
    torch.cuda.empty_cache()
    before = allocated_bytes()
    torch.cuda.reset_peak_memory_stats()
    kernels = select_kernels("gpu", dtype=BF16, device=CUDA)
    models = build_dummy("shrunken", kernels=kernels, dtype=BF16, device=CUDA, context_length=CONTEXT_LENGTH)
    gc.collect()
    weights = allocated_bytes() - before
    settings = EngineConfig(context_length=CONTEXT_LENGTH, max_seats=MAX_SEATS)
    config = resolve_config(settings, device=CUDA, max_positions=CONTEXT_LENGTH, row_invariant=True)
    assert config.rows_per_step == 2048
    plan = planned(models, config)
    engine = make_engine(models.target, models.drafter, None, config)
    held = allocated_bytes() - before
    planned_weights, planned_caches = plan.parts["target"] + plan.parts["drafter"], plan.parts["drafter context"]
    planned_caches += plan.cache_bytes
    assert weights == pytest.approx(planned_weights, rel=0.01)
    assert held - weights == pytest.approx(planned_caches, rel=0.01)

    run_full_load(engine)
    greedy_pass = torch.cuda.max_memory_allocated() - before - held
    run_full_load(engine, temperature=1.0)
    peak, pool = torch.cuda.max_memory_allocated() - before, pool_bytes(engine)
    total = sum(plan.parts.values()) + plan.cache_bytes
    found = {"greedy pass": greedy_pass, "any pass": peak - held, "pool": pool, "held": held, "planned": plan}
    assert 0 < pool <= plan.parts["graphs"], found
    assert 0 < greedy_pass <= plan.parts["a pass"] <= 1.1 * greedy_pass + (32 << 20), found
    assert peak - held <= plan.parts["a pass"] + plan.parts["logits of a cycle"], found
    assert peak + pool <= total, found
    assert planned_weights + planned_caches <= 1.05 * held
