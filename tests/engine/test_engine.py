"""The engine on toy models: plain decoding is the reference, whatever is drafted, batched, padded or aborted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core import Chunk, SamplingParams
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.proposer import DFlashProposer
from outrider.errors import ConfigError, RequestError
from outrider.models.attention import allocate_caches
from outrider.models.gemma import GemmaTarget
from tests.scripted import FixedProposer, ScriptedProposer, TableTarget, make_test_engine, run_requests
from tests.toy import CPU, reference_greedy, toy_drafter, toy_target

NUM_TOKENS = 16
PROMPTS = ([5, 17, 80], [3], [44, 9, 61, 2, 33, 70, 12, 8, 50])  # the last is longer than the window
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def target() -> GemmaTarget:
    return toy_target()


@pytest.fixture(scope="module")
def answers(target: GemmaTarget) -> list[list[int]]:
    """Greedy answers to PROMPTS, by full recomputation."""
    return [reference_greedy(target, prompt, NUM_TOKENS) for prompt in PROMPTS]


def dflash(target: GemmaTarget, block_size: int = 5, *, num_seats: int = 4) -> DFlashProposer:
    drafter = toy_drafter(target, block_size=block_size)
    caches = allocate_caches(
        drafter.config.layers, num_seats=num_seats, context_length=128, max_rows=64, dtype=torch.float64, device=CPU
    )
    return DFlashProposer(drafter, caches)


def run_one(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return run_requests(engine, (prompt, params))[0]


def finish(engine: Engine) -> list[Chunk]:
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    return chunks


@pytest.mark.parametrize("script", [(), (0,), (3, 0, 2, 4, 1)], ids=["full", "none", "mixed"])
def test_greedy_text_is_the_references_for_every_acceptance(
    target: GemmaTarget, answers: list[list[int]], script: tuple[int, ...]
) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        engine = make_test_engine(target, ScriptedProposer([prompt + answer], script=script))
        assert run_one(engine, prompt, GREEDY) == answer


def test_a_batch_with_ragged_acceptance_is_every_request_alone(target: GemmaTarget, answers: list[list[int]]) -> None:
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    texts[1] = [0] * 40  # its drafts are wrong nearly always, the others' right
    proposer = ScriptedProposer(texts, script=(4, 2, 0, 3))
    params = [replace(GREEDY, num_speculative_tokens=n) for n in (4, 3, 1)]
    engine = make_test_engine(target, proposer)
    assert run_requests(engine, *zip(PROMPTS, params, strict=True)) == answers


def test_waiting_requests_take_seats_as_they_become_free(target: GemmaTarget, answers: list[list[int]]) -> None:
    engine = make_test_engine(target, dflash(target, num_seats=2), max_seats=2)
    lengths = (3, NUM_TOKENS, 9)
    requests = [(prompt, replace(GREEDY, max_tokens=n)) for prompt, n in zip(PROMPTS, lengths, strict=True)]
    assert run_requests(engine, *requests) == [answer[:n] for answer, n in zip(answers, lengths, strict=True)]


@pytest.mark.parametrize("block_size", [5, 8])
def test_a_seeded_request_is_the_same_with_and_without_drafts(target: GemmaTarget, block_size: int) -> None:
    params = replace(SAMPLED, seed=7, top_p=0.95)
    plain = run_one(make_test_engine(target), PROMPTS[0], params)
    engine = make_test_engine(target, dflash(target, block_size))
    for draft_length in (0, 3, block_size - 1):
        assert run_one(engine, PROMPTS[0], replace(params, num_speculative_tokens=draft_length)) == plain


def test_padded_passes_give_the_same_tokens(target: GemmaTarget, answers: list[list[int]]) -> None:
    settings = {"max_seats": 1, "rows_per_pass": 7, "prefill_rows": 7}
    engine = make_test_engine(target, dflash(target, num_seats=1), **settings)
    assert run_requests(engine, *((prompt, GREEDY) for prompt in PROMPTS)) == answers
    seeded = replace(SAMPLED, seed=3)
    assert run_one(engine, PROMPTS[2], seeded) == run_one(make_test_engine(target), PROMPTS[2], seeded)


def test_padded_passes_have_one_shape() -> None:
    target = TableTarget.constant([0.2, 0.8])
    engine = make_test_engine(target, ScriptedProposer([[1] * 60], vocab_size=2), max_seats=1, rows_per_pass=6)
    run_one(engine, [1] * 8, GREEDY)
    assert {len(rows.seats) for rows in target.passes} == {6}


@pytest.mark.parametrize("prefill_rows", [1, 4, 9, 64])
def test_the_prompt_may_come_in_pieces(target: GemmaTarget, answers: list[list[int]], prefill_rows: int) -> None:
    proposer = ScriptedProposer([PROMPTS[2] + answers[2]], max_draft_length=min(4, prefill_rows - 1))
    engine = make_test_engine(target, proposer, prefill_rows=prefill_rows)
    assert run_one(engine, PROMPTS[2], replace(GREEDY, max_tokens=2)) == answers[2][:2]
    rows = [position for commit in proposer.commits for position in commit.positions]
    assert rows[: len(PROMPTS[2])] == list(range(len(PROMPTS[2])))


def test_chunks_say_what_each_cycle_brought(target: GemmaTarget, answers: list[list[int]]) -> None:
    engine = make_test_engine(target, ScriptedProposer([PROMPTS[0] + answers[0]], script=(3, 0)))
    request = engine.add(PROMPTS[0], replace(GREEDY, max_tokens=6))
    chunks = finish(engine)
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 4, 1]
    assert [chunk.num_accepted_draft_tokens for chunk in chunks] == [0, 3, 0]
    assert [chunk.num_draft_tokens for chunk in chunks] == [0, 4, 0]  # nothing past the limit is drafted
    assert chunks[-1].finish_reason == request.finish_reason == "length"
    assert (request.acceptance.num_cycles, request.acceptance.accepted_histogram) == (1, {3: 1})


def test_end_tokens_end_a_request_unless_ignored() -> None:
    table = torch.eye(4).roll(1, dims=1) * 9  # 0, 1, 2, 3, 0, …
    for proposer in (None, ScriptedProposer([[0, 1, 2, 3] * 10], vocab_size=4)):
        engine = make_test_engine(TableTarget(table), proposer, end_token_ids=[3])
        assert run_one(engine, [0], replace(GREEDY, max_tokens=6)) == [1, 2, 3]
        assert run_one(engine, [0], replace(GREEDY, max_tokens=6, ignore_eos=True)) == [1, 2, 3, 0, 1, 2]
        assert run_one(engine, [0], replace(GREEDY, stop_token_ids=(2,))) == [1, 2]


def test_the_context_limit_ends_a_request() -> None:
    engine = make_test_engine(TableTarget.constant([0.9, 0.1]), context_length=10)
    request = engine.add([0] * 7, SamplingParams())
    finish(engine)
    assert (len(request.output_token_ids), request.finish_reason) == (3, "length")


def test_abort_frees_the_seat_at_once(target: GemmaTarget, answers: list[list[int]]) -> None:
    engine = make_test_engine(target, dflash(target, num_seats=1), max_seats=1)
    running, waiting = engine.add(PROMPTS[0], GREEDY), engine.add(PROMPTS[1], GREEDY)
    engine.step()
    engine.step()
    engine.abort(waiting)
    engine.abort(running)
    assert not engine.has_work
    last = engine.add(PROMPTS[2], GREEDY)
    finish(engine)
    assert last.output_token_ids == answers[2]
    assert engine.scheduler.space.num_free == 1
    assert running.finish_reason == waiting.finish_reason == "abort"


def test_an_idle_engine_does_nothing() -> None:
    assert make_test_engine(TableTarget.constant([0.5, 0.5])).step() == []


class FaultyTarget(TableTarget):
    """Token 3 leads to NaN."""

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where(hidden == 3, torch.nan, super().logits(hidden))


@pytest.mark.parametrize("prompts", [([0], [2], [0]), ([0], [3], [0])], ids=["later", "prompt"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, seed=1)], ids=["greedy", "rejection", "matching"])
def test_a_request_with_nan_fails_and_the_others_go_on(prompts: Sequence[list[int]], params: SamplingParams) -> None:
    table = torch.full((4, 4), -torch.inf)
    table[[0, 1, 2, 3], [1, 0, 3, 0]] = 0.0  # 0, 1, 0, 1, …; 2 leads to 3
    engine = make_test_engine(FaultyTarget(table), ScriptedProposer([[0, 1] * 30] * 3, vocab_size=4), max_seats=3)
    requests = [engine.add(prompt, params) for prompt in prompts]
    chunks = finish(engine)
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert requests[0].output_token_ids == requests[2].output_token_ids == [1, 0] * (NUM_TOKENS // 2)
    assert [chunk for chunk in chunks if chunk.finish_reason == "error"] == [Chunk(1, "", (), 0, "error")]


def test_unseeded_requests_differ_and_repeat_with_the_engines_seed() -> None:
    def texts(seed: int) -> list[list[int]]:
        engine = make_test_engine(TableTarget.constant([0.5, 0.5]), seed=seed)
        return run_requests(engine, ([0], SAMPLED), ([0], SAMPLED))

    first, second = texts(0)
    assert first != second
    assert texts(0) == [first, second]
    assert first not in texts(1)


@pytest.mark.parametrize("prompt", [[], [0] * 128, [-1], [2]])
def test_prompts_that_cannot_run_are_refused(prompt: list[int]) -> None:
    engine = make_test_engine(TableTarget.constant([0.5, 0.5]))
    with pytest.raises(RequestError, match="the prompt"):
        engine.add(prompt, GREEDY)
    assert not engine.has_work


def test_draft_lengths_are_the_requests_the_engines_or_the_drafters() -> None:
    proposer = FixedProposer(torch.tensor([0.5, 0.5]), max_draft_length=4)
    engine = make_test_engine(TableTarget.constant([0.5, 0.5]), proposer, num_speculative_tokens=2)
    assert engine.add([0], GREEDY).draft_length == 2
    assert engine.add([0], replace(GREEDY, num_speculative_tokens=0)).draft_length == 0
    assert make_test_engine(engine.target, proposer).add([0], GREEDY).draft_length == 4
    assert make_test_engine(engine.target).add([0], replace(GREEDY, num_speculative_tokens=3)).draft_length == 0
    with pytest.raises(RequestError, match=r"num_speculative_tokens=5.*at most 4"):
        engine.add([0], replace(GREEDY, num_speculative_tokens=5))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_speculative_tokens": 5}, "drafts at most 4"),
        ({"rows_per_pass": 8, "max_seats": 2}, "max_seats=1"),
        ({"rows_per_pass": 4, "max_seats": 1}, "less than a block of 5 rows"),
        ({"prefill_rows": 4}, "a block of fixed has 5 rows"),
    ],
)
def test_engines_that_cannot_work_are_refused(settings: dict[str, int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_test_engine(TableTarget.constant([0.5, 0.5]), FixedProposer(torch.tensor([0.5, 0.5])), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"context_length": 1},
        {"max_seats": 0},
        {"prefill_rows": 0},
        {"num_speculative_tokens": -1},
        {"rows_per_pass": 0},
        {"context_length": "a"},
        {"context_length": None},
        {"context_length": 2.5},
        {"max_seats": "2"},
        {"num_speculative_tokens": 1.5},
        {"num_speculative_tokens": True},
        {"seed": "a"},
        {"acceptance": "typical"},
        {"acceptance": None},
        {"acceptance": ["block"]},
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_prefill_alone_decodes_nobody_and_changes_no_text(target: GemmaTarget, answers: list[list[int]]) -> None:
    engine = make_test_engine(target, dflash(target), prefill_rows=8)
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    while not all(request.output_token_ids for request in requests):
        engine.prefill()
    assert [len(request.output_token_ids) for request in requests] == [1, 1, 1]
    while engine.has_work:
        engine.step()
    assert [request.output_token_ids for request in requests] == answers
