"""Captured cycles on CUDA in bf16: the texts of `run_cycle`, bit for bit, and nothing read between two replays.

A shrunken Gemma 4 31B (K=V layers, two head sizes, normed values, layer scalars) with random weights. Kernels that are
row-invariant decode several requests at a time; torch's do one, in constant shapes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.backends.local import make_engine, resolve_config
from outrider.backends.memory_plan import plan_caches
from outrider.core import SamplingParams
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.graphs import SPARE_REQUEST
from outrider.errors import ConfigError
from outrider.kernels.ops import select_kernels
from outrider.kernels.reference import TorchKernels
from outrider.models.config import TargetConfig
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget
from outrider.weights.packed import DenseWeight
from tests.device_script import DeviceScript
from tests.scripted import make_test_engine
from tests.toy import SOURCE, toy_checkpoint, toy_drafter_config, toy_drafter_tensors, toy_target_config

CUDA, BF16 = "cuda", torch.bfloat16
VOCAB, SIZE, INNER, NUM_HEADS, CONTEXT_LENGTH, NUM_TOKENS = 512, 256, 512, 4, 512, 96
MAX_DRAFTS = 7
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)
PROMPTS = [[(7 * i + 3 * seat) % VOCAB for i in range(1, 20 + 9 * seat)] for seat in range(6)]
MASK_TOKEN_ID = VOCAB - 1

every_set = pytest.mark.parametrize("name", ["torch", "auto"])


def target_config() -> TargetConfig:
    """31B's kinds of layers, small."""
    small = toy_target_config(VOCAB)
    sliding = replace(small.layers[0], num_kv_heads=2, head_dim=128, window=64)
    full = replace(small.layers[3], num_kv_heads=1, head_dim=256, values_are_keys=True)
    return replace(
        small,
        hidden_size=SIZE,
        intermediate_size=INNER,
        num_heads=NUM_HEADS,
        layers=(sliding, sliding, full, sliding, full),
        norm_offset=0.0,
        norms_values=True,
        has_layer_scalars=True,
        final_logit_softcapping=30.0,
    )


@functools.cache
def target(name: str) -> GemmaTarget:
    """Random weights on the kernel set of that name."""
    config, device = target_config(), torch.device(CUDA)
    checkpoint = toy_checkpoint(config)
    for index in range(len(config.layers)):
        scalar = f"model.layers.{index}.layer_scalar"
        checkpoint.tensors[scalar] = DenseWeight(scalar, torch.tensor([0.7 + 0.1 * index]))  # type: ignore[index]
    kernels = TorchKernels(BF16, device) if name == "torch" else select_kernels(name, dtype=BF16, device=device)
    return GemmaTarget(config, checkpoint, kernels=kernels, dtype=BF16, device=device, context_length=CONTEXT_LENGTH)


@functools.cache
def drafter(name: str) -> DFlashDrafter:
    """Random weights: it is right now and then."""
    config = toy_drafter_config(block_size=MAX_DRAFTS + 1, vocab_size=VOCAB, mask_token_id=MASK_TOKEN_ID)
    spec = replace(config.layers[0], num_kv_heads=2, head_dim=128)
    config = replace(
        config,
        hidden_size=SIZE,
        intermediate_size=INNER,
        num_heads=NUM_HEADS,
        layers=(spec, spec),
        num_target_layers=5,
    )
    model = target(name)
    return DFlashDrafter(
        config,
        toy_drafter_tensors(config),
        model,
        kernels=model.kernels,
        context_length=CONTEXT_LENGTH,
        source=SOURCE,
    )


def fitted(name: str, **settings: Any) -> EngineConfig:
    """As `load` fits a config to a kernel set."""
    config = EngineConfig(
        **{"context_length": CONTEXT_LENGTH, "max_seats": len(PROMPTS), "row_budget": 256, **settings}
    )
    return resolve_config(
        config,
        device=torch.device(CUDA),
        max_positions=CONTEXT_LENGTH,
        row_invariant=target(name).kernels.row_invariant,
    )


def run(engine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
    assert [request.error for request in requests] == [None] * len(requests)
    assert engine.drafter_fault is None
    return [request.output_token_ids for request in requests]


def drafting_engine(name: str, **settings: Any) -> Engine:
    return make_engine(target(name), drafter(name), None, fitted(name, **settings))


@functools.cache
def plain_texts(name: str) -> list[list[int]]:
    """By `run_cycle`, without drafts."""
    return run(make_engine(target(name), None, None, fitted(name, cuda_graphs=False)))


def scripted_engine(name: str, **settings: Any) -> Engine:
    """Seats are given in the order of the prompts where there is one for each; else drafts are wrong, and no harm."""
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain_texts(name), strict=True)]
    config = fitted(name, **settings)
    engine = make_test_engine(
        target(name), DeviceScript(texts, max_draft_length=MAX_DRAFTS, vocab_size=VOCAB, device=CUDA), **vars(config)
    )
    engine.warm_up()
    return engine


@pytest.mark.gpu
@every_set
def test_plain_texts_are_those_of_run_cycle(name: str) -> None:
    engine = make_engine(target(name), None, None, fitted(name))
    assert engine.device_cycle is not None
    assert run(engine) == plain_texts(name)
    assert len({token for text in plain_texts(name) for token in text}) > 20


@pytest.mark.gpu
@every_set
def test_drafted_texts_are_the_plain_ones(name: str) -> None:
    engine = drafting_engine(name)
    assert run(engine) == plain_texts(name)
    for length in (1, 3):
        assert run(engine, replace(GREEDY, num_speculative_tokens=length)) == plain_texts(name)
    assert run(drafting_engine(name, cuda_graphs=False)) == plain_texts(name)


@pytest.mark.gpu
def test_scripted_drafts_change_nothing_whatever_is_accepted() -> None:
    name = "auto"  # plain torch is exact within one layout of caches only, and these are two
    engine = scripted_engine(name)
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
    assert [request.output_token_ids for request in requests] == plain_texts(name)
    counts = {count for request in requests for count in request.acceptance.accepted_histogram}
    if engine.config.max_seats == len(PROMPTS):
        assert counts >= set(range(MAX_DRAFTS + 1))
    expected = scripted_engine(name, cuda_graphs=False)
    assert run(expected) == plain_texts(name)


@pytest.mark.gpu
@every_set
def test_other_requests_come_and_go(name: str) -> None:
    sampled = replace(GREEDY, temperature=1.0, seed=4, max_tokens=12)
    texts = []
    for cuda_graphs in (False, True):
        engine = drafting_engine(name, cuda_graphs=cuda_graphs)
        requests = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, [GREEDY, sampled] * 3, strict=True)]
        while engine.has_work:
            engine.step()
        texts.append([request.output_token_ids for request in requests])
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_preempted_requests_write_the_same() -> None:
    config = fitted("auto", prefill_rows=64)
    if config.max_seats == 1:
        pytest.skip("the kernels are not row-invariant, so that requests run one at a time and none steps back")
    layers = target("auto").config.layers, drafter("auto").config.layers

    def fits(num_bytes: int) -> bool:
        try:
            plan_caches(*layers, replace(config, cache_bytes=num_bytes), dtype=BF16)
        except ConfigError:
            return False
        return True

    most = plan_caches(*layers, config, dtype=BF16).num_bytes
    least = next(num_bytes for num_bytes in range(most // 200, most, most // 200) if fits(num_bytes))
    long = [[prompt[i % len(prompt)] for i in range(200)] for prompt in PROMPTS]
    texts = []
    for num_bytes in (None, least):
        engine = make_engine(target("auto"), drafter("auto"), None, replace(config, cache_bytes=num_bytes))
        requests = [engine.add(prompt, replace(GREEDY, max_tokens=200)) for prompt in long]
        while engine.has_work:
            engine.step()
        texts.append([request.output_token_ids for request in requests])
    assert engine.scheduler.num_preemptions > 0
    assert texts[0] == texts[1]


SEEDED = replace(GREEDY, temperature=1.0, seed=5, max_tokens=48)
SAMPLED_ONES = [
    SEEDED,
    replace(SEEDED, top_k=20, temperature=0.7, seed=2**40),
    replace(SEEDED, top_p=0.8, seed=-3),
    replace(GREEDY, max_tokens=48),
    replace(SEEDED, min_p=0.05, seed=0),
    replace(SEEDED, top_k=50, top_p=0.9, temperature=1.3),
]


def texts_of(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    requests = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    while engine.has_work:
        engine.step()
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.output_token_ids for request in requests]


@pytest.mark.gpu
def test_seeded_texts_are_equal_whatever_runs_them() -> None:
    """Without drafts by `run_cycle`, captured with and without drafts, and beside a request that needs the host."""
    plain = texts_of(make_engine(target("auto"), None, None, fitted("auto", cuda_graphs=False)), SAMPLED_ONES)
    assert len({token for text in plain for token in text}) > 40
    assert texts_of(make_engine(target("auto"), None, None, fitted("auto")), SAMPLED_ONES) == plain
    engine = drafting_engine("auto")
    assert engine.device_cycle is not None
    assert texts_of(engine, SAMPLED_ONES) == plain
    shorter = [replace(each, num_speculative_tokens=index % 4) for index, each in enumerate(SAMPLED_ONES)]
    assert texts_of(engine, shorter) == plain
    assert texts_of(drafting_engine("auto", cuda_graphs=False), SAMPLED_ONES) == plain
    beside = [*SAMPLED_ONES[:3], replace(GREEDY, logprobs=2, max_tokens=20), *SAMPLED_ONES[4:]]
    assert texts_of(engine, beside) == [*plain[:3], plain[3][:20], *plain[4:]]


@pytest.mark.gpu
@pytest.mark.parametrize("is_drafting", [False, True])
def test_unseeded_tokens_follow_the_exact_distribution(is_drafting: bool) -> None:
    """The second token, drafted or not, given the first: against what raw log-probabilities leave of it."""
    engine = drafting_engine("auto") if is_drafting else make_engine(target("auto"), None, None, fitted("auto"))
    sampled, asking = replace(GREEDY, temperature=1.0, top_k=3, max_tokens=3), replace(GREEDY, logprobs=3, max_tokens=1)
    requests = [engine.add(PROMPTS[0], sampled) for _ in range(900)]
    while engine.has_work:
        engine.step()
    pairs = Counter(tuple(request.output_token_ids[:2]) for request in requests)
    for first in {pair[0] for pair in pairs}:
        asked = engine.add([*PROMPTS[0], first], asking)
        while engine.has_work:
            engine.step()
        (likeliest,) = (dict(each.top) for each in asked.logprobs)
        ids, chances = list(likeliest), torch.tensor(list(likeliest.values())).softmax(-1).tolist()
        counts = {pair[1]: count for pair, count in pairs.items() if pair[0] == first}
        total = sum(counts.values())
        assert set(counts) <= set(ids)
        for token_id, chance in zip(ids, chances, strict=True):
            spread = (total * chance * (1 - chance)) ** 0.5
            assert abs(counts.get(token_id, 0) - total * chance) <= 4.5 * spread + 1e-9, (first, counts, chances)
    if is_drafting:
        assert sum(request.acceptance.num_draft_tokens for request in requests) > 500


@pytest.fixture
def syncs_are_errors() -> Iterator[None]:
    """To be begun with `torch.cuda.set_sync_debug_mode("error")` after prompts are in."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@every_set
@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, replace(SEEDED, seed=None)], ids=["greedy", "seeded", "unseeded"])
def test_a_replay_waits_for_nothing(
    name: str, params: SamplingParams, is_drafting: bool, syncs_are_errors: None
) -> None:
    model = drafter(name) if is_drafting else None
    engine = make_engine(target(name), model, None, fitted(name))
    engine.warm_up()
    requests = [engine.add(prompt, params) for prompt in PROMPTS[: engine.config.max_seats]]
    while not all(request.output_token_ids for request in requests):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    while engine.has_work:
        engine.step()
    assert [request.finish_reason for request in requests] == ["length"] * len(requests)


@pytest.mark.gpu
@pytest.mark.parametrize("is_drafting", [False, True])
def test_pages_that_come_while_a_cycle_is_under_way(is_drafting: bool) -> None:
    """Small pages: tables are copied every few cycles, while the one before still runs."""
    model, texts = drafter("auto") if is_drafting else None, []
    for cuda_graphs in (False, True):
        config = fitted("auto", page_size=16, cuda_graphs=cuda_graphs)
        texts.append(run(make_engine(target("auto"), model, None, config)))
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_a_table_is_read_when_a_graph_is_replayed_and_not_when_it_was_captured() -> None:
    engine = drafting_engine("auto")
    cycle = engine.device_cycle
    assert cycle is not None
    with torch.inference_mode():
        for value in (3, 7):
            cycle._sent_numbers[:] = [[number] for number in SPARE_REQUEST]  # nothing is written
            cycle._sent_numbers[1] = value
            cycle._received_numbers[:] = -5
            cycle._run_load()
            cycle._run_verify(1, is_sampled=False)
            torch.cuda.synchronize()
            assert cycle._requests[1].tolist() == [value] * engine.config.max_seats
            assert cycle._received_numbers.tolist() == cycle._decided.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_cycle_begun_ahead_changes_nothing_whoever_comes_and_goes(is_drafting: bool, params: SamplingParams) -> None:
    """Requests end by a stop token, are dropped and join in the middle, while the device has begun the next cycle."""
    model = drafter("auto") if is_drafting else None
    texts = []
    for runs_ahead in (False, True):
        engine = make_engine(target("auto"), model, None, fitted("auto", page_size=16))
        cycle = engine.device_cycle
        assert cycle is not None
        cycle.runs_ahead, begun = runs_ahead, 0
        stop_ids = [plain_texts("auto")[seat][11 * (seat + 1)] for seat in range(3)]
        stopped = [replace(params, stop_token_ids=(stop_id,)) for stop_id in stop_ids]
        requests = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, [*stopped, params], strict=False)]
        for num_steps in range(CONTEXT_LENGTH + 40):
            if num_steps == 30:
                engine.abort(requests[3])
                requests.append(engine.add(PROMPTS[4], params))
            if num_steps == 31:
                requests.append(engine.add(PROMPTS[5], replace(params, max_tokens=CONTEXT_LENGTH)))
            engine.step()
            begun += cycle._begun is not None
        assert not engine.has_work
        assert (begun > 60) == runs_ahead
        texts.append([request.output_token_ids for request in requests if request.finish_reason != "abort"])
    assert texts[0] == texts[1]
    assert len(texts[0][-1]) == CONTEXT_LENGTH - len(PROMPTS[5])
