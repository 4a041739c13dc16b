"""T-056: the memory plan counts the drafter: weights, context, and logits of anchors and drafts over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.backends.local import make_engine
from outrider.backends.memory_plan import plan_engine_memory, plan_memory
from outrider.core import SamplingParams
from outrider.engine.engine import EngineConfig
from tests.toy import toy_drafter, toy_target

BUDGET = 1_000_000
SIZES: dict[str, Any] = {
    "available_bytes": BUDGET,
    "target_bytes": 300_000,
    "drafter_bytes": 50_000,
    "drafter_context_bytes": 640 * 64 * 4,
    "cache_bytes": 0,
    "max_seats": 4,
    "vocab_size": 96,
}


def test_t056_by_hand() -> None:
    assert plan_memory(**SIZES, max_draft_length=4).most_cache_bytes == 478_480
    assert plan_memory(**SIZES, max_draft_length=16).most_cache_bytes < 478_480


class LargestLogits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the largest tensor [rows, vocabulary] that was made."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[1] == 96:
            self.num_bytes = max(self.num_bytes, result.numel() * 4)
        return result


def test_t056_full_load_stays_within_the_plan() -> None:
    target = toy_target(context_length=64)
    drafter = toy_drafter(target, context_length=64)
    config = EngineConfig(context_length=64, max_seats=4)
    plan = plan_engine_memory(target, drafter, config, available_bytes=10_000_000)
    engine = make_engine(target, drafter, None, config)
    kv_cache = engine.scheduler.space.kv_cache  # type: ignore[attr-defined]
    for caches, planned in (
        (kv_cache.target_caches, plan.cache_bytes),
        (kv_cache.drafter_caches, plan.parts["drafter context"]),
    ):
        assert sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) == planned
    for seed in range(4):
        engine.add([5, 17, 80], SamplingParams(max_tokens=61, temperature=1.0, seed=seed))
    with LargestLogits() as largest:  # type: ignore[no-untyped-call]
        for _ in range(4):
            engine.step()
    assert len(engine.scheduler.running) == 4
    assert 0 < largest.num_bytes <= plan.parts["logits of a cycle"]
