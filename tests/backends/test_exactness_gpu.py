"""The 31B at its full size on a GPU, made-up weights: greedy text is the same bits whatever else happens.

With and without drafts of which every count is accepted, alone and in batches of 4 and 16, after a request lost its
seat, and on a prefix that was found in the caches. Takes some minutes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest
import torch

from outrider.backends.dummy import Models, build_dummy
from outrider.backends.exactness import answer_all
from outrider.backends.local import are_rows_exact, make_engine, resolve_config
from outrider.core import SamplingParams
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.state import RequestState
from outrider.kernels.ops import select_kernels
from tests.device_script import DeviceScript

CUDA, BF16, VOCAB = torch.device("cuda"), torch.bfloat16, 262_144
CONTEXT_LENGTH, NUM_TOKENS, MAX_DRAFTS, NUM_PROMPTS, NUM_ALONE = 2048, 256, 15, 64, 16
PROMPTS = [[2, *((7919 * i + 131 * at) % 200_000 for i in range(20 + 17 * at))] for at in range(NUM_PROMPTS)]


@functools.cache
def models() -> Models:
    kernels = select_kernels("auto", dtype=BF16, device=CUDA)
    return build_dummy("31b", kernels=kernels, dtype=BF16, device=CUDA, context_length=CONTEXT_LENGTH)


@pytest.fixture(autouse=True)
def _caches_of_one_engine_at_a_time() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def engine(max_seats: int, *, is_drafting: bool = False, **settings: int) -> Engine:
    target, drafter = models()
    config = EngineConfig(context_length=CONTEXT_LENGTH, max_seats=max_seats, row_budget=256, **settings)
    are_exact = are_rows_exact(target.kernels, target.config)
    assert are_exact
    fitted = resolve_config(config, device=CUDA, max_positions=CONTEXT_LENGTH, row_invariant=are_exact)
    return make_engine(target, drafter if is_drafting else None, None, fitted)


@functools.cache
def texts() -> list[list[int]]:
    """Plain, sixteen at a time."""
    return answer_all(engine(16), PROMPTS, NUM_TOKENS)


def run(engine: Engine, prompts: list[list[int]]) -> list[RequestState]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    assert engine.drafter_fault is None
    return requests


@pytest.mark.gpu
def test_alone_and_in_other_batches() -> None:
    assert len({tuple(text) for text in texts()}) == NUM_PROMPTS
    assert answer_all(engine(1), PROMPTS[:NUM_ALONE], NUM_TOKENS) == texts()[:NUM_ALONE]
    assert answer_all(engine(4), PROMPTS, NUM_TOKENS) == texts()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_drafts_of_every_count_change_nothing(batch: int) -> None:
    """Captured cycles, the scripts of one group of seats after the other."""
    scripted, counts = engine(batch), set[int]()
    for start in range(0, NUM_ALONE if batch == 1 else NUM_PROMPTS, batch):
        group = slice(start, start + batch)
        whole = [prompt + text for prompt, text in zip(PROMPTS[group], texts()[group], strict=True)]
        scripted.use_proposer(
            DeviceScript(whole, max_draft_length=MAX_DRAFTS, vocab_size=VOCAB, device=CUDA, tap_layers=(1,))
        )
        requests = run(scripted, PROMPTS[group])
        assert [request.output_token_ids for request in requests] == texts()[group]
        counts.update(*(request.acceptance.accepted_histogram for request in requests))
    assert counts == set(range(MAX_DRAFTS + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16])
def test_the_drafters_own_drafts_change_nothing(batch: int) -> None:
    requests = run(engine(batch, is_drafting=True), PROMPTS[:NUM_ALONE])
    assert [request.output_token_ids for request in requests] == texts()[:NUM_ALONE]
    assert all(request.acceptance.num_draft_tokens > 0 for request in requests)


@pytest.mark.gpu
def test_who_lost_its_seat_writes_the_same() -> None:
    prompts = PROMPTS[-8:]
    room = engine(8).scheduler.space.kv_cache.plan.num_bytes  # type: ignore[attr-defined]
    tight = engine(8, is_drafting=True, cache_bytes=room * 5 // 8)
    requests = run(tight, prompts)
    assert [request.output_token_ids for request in requests] == texts()[-8:]
    assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.gpu
def test_a_prefix_that_was_found_gives_the_same() -> None:
    served = engine(4, is_drafting=True)
    for is_again in (False, True):
        requests = run(served, PROMPTS[-4:])
        assert [request.output_token_ids for request in requests] == texts()[-4:]
        assert all((request.num_cached_tokens > 0) is is_again for request in requests)
