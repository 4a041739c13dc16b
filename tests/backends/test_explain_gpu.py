"""`outrider explain` at full size: the 31B, its drafter and four seats take what was said.

Weights are made up on the GPU, 65 GB of them.
"""

from __future__ import annotations

import gc

import pytest
import torch

from outrider.backends.account import held_bytes
from outrider.backends.dummy import build_dummy
from outrider.backends.explain import explain_memory
from outrider.backends.local import make_engine, resolve_config
from outrider.core import SamplingParams
from outrider.engine.engine import EngineConfig
from outrider.kernels.ops import select_kernels
from tests.backends.test_memory_plan_gpu import allocated_bytes, pool_bytes

pytestmark = pytest.mark.gpu
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
CONTEXT_LENGTH, MAX_SEATS = 8192, 4


def test_the_31b_and_its_drafter_take_what_was_said() -> None:
    settings = EngineConfig(context_length=CONTEXT_LENGTH, max_seats=MAX_SEATS)
    memory = torch.cuda.get_device_properties(CUDA).total_memory
    said = explain_memory("31b", drafter="auto", config=settings, gpu_memory_bytes=memory, progress=lambda _: None)
    assert said["fits"]
    gc.collect()
    torch.cuda.empty_cache()
    before = allocated_bytes()
    kernels = select_kernels("gpu", dtype=BF16, device=CUDA)
    target, drafter = build_dummy("31b", kernels=kernels, dtype=BF16, device=CUDA, context_length=CONTEXT_LENGTH)
    gc.collect()
    weights = allocated_bytes() - before
    assert said["target_bytes"] == pytest.approx(held_bytes(target), rel=0.05)
    assert said["target_bytes"] + said["drafter_bytes"] == pytest.approx(weights, rel=0.05)

    config = resolve_config(settings, device=CUDA, max_positions=CONTEXT_LENGTH, row_invariant=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(target, drafter, None, config)
    held = allocated_bytes() - before
    assert said["cache_bytes"] == pytest.approx(held - weights, rel=0.05)
    assert said["allocated_bytes"] == pytest.approx(held, rel=0.05)

    prompt = [(7919 * at) % 200_000 + 2 for at in range(CONTEXT_LENGTH - 64)]
    request = engine.add(prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert request.error is None
    one_pass, pool = torch.cuda.max_memory_allocated() - before - held, pool_bytes(engine)
    found = {"weights": weights, "caches": held - weights, "pass": one_pass, "pool": pool, "said": said}
    assert one_pass <= said["pass_bytes"] <= 1.1 * one_pass + (32 << 20), found
    assert 0 < pool <= said["graphs_bytes"], found
    whole = said["allocated_bytes"] + said["pass_bytes"] + said["graphs_bytes"]
    assert whole == pytest.approx(held + one_pass + pool, rel=0.05)
