"""The library API: on table targets, and plain decoding on the embedded default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider import metrics
from outrider.backends import local
from outrider.backends.local import LLM, are_rows_exact, drafter_path, load, make_engine, resolve_config, resolve_device
from outrider.benchmarking.workloads import TEST
from outrider.core import Chunk, SamplingParams
from outrider.engine.engine import EngineConfig
from outrider.errors import ConfigError, EngineFault, RequestError
from outrider.models.config import ExpertsSpec
from tests.embedded import plain_llm, unpacked_drafter
from tests.scripted import ScriptedProposer, TableTarget, make_test_engine
from tests.toy import toy_target_config

PROMPTS = ["The capital of France is", "1, 2, 3, 4,"]
SHORT = SamplingParams(max_tokens=12)


@pytest.fixture(scope="session")
def embedded() -> LLM:
    """The embedded default without a drafter."""
    return load(drafter=None, config=EngineConfig(context_length=128), device="cpu")


def make_llm(target: TableTarget, **settings: Any) -> LLM:
    """Prompts are token ids: a table target has no tokenizer."""
    return LLM(make_test_engine(target, **settings), tokenizer=None)  # type: ignore[arg-type]


@pytest.fixture
def counting() -> LLM:
    """0, 1, 2, 3, 4, 0, …"""
    return make_llm(TableTarget(torch.eye(5).roll(1, dims=1) * 9), max_seats=2)


def test_streamed_text_is_the_generated_text(embedded: LLM) -> None:
    generations = embedded.generate(PROMPTS, SHORT)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        chunks = list(embedded.stream(prompt, SHORT))
        assert "".join(chunk.text for chunk in chunks) == generation.text
        assert tuple(token_id for chunk in chunks for token_id in chunk.token_ids) == generation.token_ids
        assert chunks[-1].finish_reason == generation.finish_reason == "length"
    assert "France" in generations[0].text


def test_text_is_what_the_tokenizer_decodes(embedded: LLM) -> None:
    (generation,) = embedded.generate([PROMPTS[1]], SHORT)
    assert embedded.tokenizer.decode(generation.token_ids) == generation.text
    assert generation.num_prompt_tokens == len(embedded.encode(PROMPTS[1]))


def test_stop_strings_end_text_in_stream_and_generation(embedded: LLM) -> None:
    params = SamplingParams(max_tokens=12, stop_strings=(", 7",))
    (generation,) = embedded.generate([PROMPTS[1]], params)
    assert (generation.text, generation.finish_reason) == (" 5, 6", "stop")
    assert "".join(chunk.text for chunk in embedded.stream(PROMPTS[1], params)) == generation.text


def test_an_llm_describes_itself(embedded: LLM) -> None:
    assert (embedded.drafter_name, embedded.num_speculative_tokens) == (None, 0)
    assert embedded.kernels_name in ("cpu", "torch")


def test_text_gets_a_begin_token_and_ids_are_taken_as_they_are(embedded: LLM) -> None:
    assert embedded.encode("a")[0] == embedded.tokenizer.bos_id
    assert embedded.encode([5, 6]) == embedded.encode((5, 6)) == [5, 6]
    with pytest.raises(RequestError, match="the prompt is empty"):
        embedded.generate([""], SHORT)


def test_answers_come_in_the_order_of_the_prompts(counting: LLM) -> None:
    params = SamplingParams(max_tokens=3)
    generations = counting.generate([[3], [0, 1], [2]], params)
    assert [generation.token_ids for generation in generations] == [(4, 0, 1), (2, 3, 4), (3, 4, 0)]
    assert [generation.num_prompt_tokens for generation in generations] == [1, 2, 1]
    assert all(generation.prefill_s > 0 and generation.decode_s >= 0 for generation in generations)


def test_streams_read_in_turn_lose_nothing(counting: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    first, second = counting.stream([0], params), counting.stream([2], params)
    taken: tuple[list[Chunk], list[Chunk]] = ([next(first)], [next(second)])
    taken[0].extend(first)  # runs the cycles of both
    assert [each.token_ids for each in counting.generate([[4]], params)] == [(0, 1, 2, 3)]
    taken[1].extend(second)
    texts = [[token_id for chunk in chunks for token_id in chunk.token_ids] for chunks in taken]
    assert texts == [[1, 2, 3, 4], [3, 4, 0, 1]]


def test_leaving_a_stream_drops_its_request(counting: LLM) -> None:
    for _ in range(3):  # more than there are seats
        stream = counting.stream([0])
        next(stream)
        next(stream)
        stream.close()
        assert not counting.engine.has_work


def test_a_refused_prompt_drops_those_before_it(counting: LLM) -> None:
    with pytest.raises(RequestError):
        counting.generate([[0], []])
    assert not counting.engine.has_work


def test_one_text_in_place_of_a_list_is_refused(counting: LLM) -> None:
    with pytest.raises(ConfigError, match="a list of prompts"):
        counting.generate("text", SHORT)


@pytest.mark.parametrize("prompt", [[0], [1]], ids=["later", "prompt"])
def test_logits_that_are_not_finite_raise_and_leave_nothing_behind(prompt: list[int]) -> None:
    table = torch.tensor([[0.0, 9.0], [torch.nan, 0.0]])
    llm = make_llm(TableTarget(table))
    with pytest.raises(EngineFault, match="not finite"):
        llm.generate([prompt], SHORT)
    with pytest.raises(EngineFault, match="not finite"):
        list(llm.stream(prompt, SHORT))
    assert not llm.engine.has_work


def test_without_drafter_shares_weights_and_decodes_plainly() -> None:
    target = TableTarget(torch.eye(5).roll(1, dims=1) * 9)
    llm = make_llm(target, proposer=ScriptedProposer([[0, 1, 2, 3, 4] * 9], vocab_size=5))
    plain = llm.without_drafter()
    assert (llm.drafter_name, plain.drafter_name) == ("scripted", None)
    assert (llm.num_speculative_tokens, plain.num_speculative_tokens) == (4, 0)
    assert plain.engine.target is target
    drafted, undrafted = (each.generate([[0]], SHORT)[0] for each in (llm, plain))
    assert drafted.token_ids == undrafted.token_ids
    assert (drafted.acceptance.num_accepted_tokens, undrafted.acceptance.num_cycles) == (8, 0)


def test_end_tokens_are_the_models_and_the_tokenizers(embedded: LLM) -> None:
    target: Any = TableTarget.constant([0.5, 0.5], eos_token_ids=(1,))
    assert make_engine(target, None, None, EngineConfig()).end_token_ids == {1}
    both = make_engine(target, None, embedded.tokenizer, EngineConfig()).end_token_ids
    assert both == {1, *embedded.tokenizer.eos_ids}


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"bytes", ["a"], [1.5], [True, 2], ["a", "b"]])
def test_what_is_no_prompt_is_refused(counting: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is text or a list of token ids"):
        counting.generate([prompt])
    with pytest.raises(RequestError, match="a prompt is text or a list of token ids"):
        next(iter(counting.stream(prompt)))


@pytest.mark.parametrize("params", [[SamplingParams()], {"max_tokens": 3}])
def test_what_is_no_sampling_params_is_refused(counting: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="params is one SamplingParams"):
        counting.generate([[1, 2]], params)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        resolve_device("cuda:0")
    for name in ("toaster", "cpu:x", "cpu:9", "cuda:", "cuda:-1", "", "cuda:9999"):
        with pytest.raises(ConfigError, match=f"device='{name}'"):
            resolve_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="sees 2 CUDA devices"):
        resolve_device("cuda:2")


def test_cuda_gets_constant_shapes_and_one_seat() -> None:
    config = EngineConfig(context_length=100)
    assert resolve_config(config, device=torch.device("cpu"), max_positions=100) is config
    fixed = resolve_config(config, device=torch.device("cuda"), max_positions=100)
    assert fixed.max_seats == 1
    assert fixed.rows_per_pass == fixed.prefill_rows
    with pytest.raises(ConfigError, match="knows 99 positions"):
        resolve_config(config, device=torch.device("cpu"), max_positions=99)


def test_row_invariant_kernels_keep_what_was_asked_for() -> None:
    cuda = {"device": torch.device("cuda"), "max_positions": 4096, "row_invariant": True}
    asked = EngineConfig(max_seats=16, prefill_rows=128, page_size=32)
    assert resolve_config(asked, **cuda) == asked
    chosen = resolve_config(EngineConfig(context_length=4096), **cuda)
    assert (chosen.prefill_rows, chosen.page_size) == (2048, 64)
    assert resolve_config(EngineConfig(context_length=300), **cuda).prefill_rows == 300
    assert EngineConfig().rows_per_step == 64


def test_rows_of_experts_are_exact_on_a_cpu_alone() -> None:
    dense, experts = (
        toy_target_config(),
        replace(toy_target_config(), experts=ExpertsSpec(num_experts=4, num_chosen=2, intermediate_size=8)),
    )
    for name, is_exact in (("gpu", False), ("cpu", True)):
        kernels = SimpleNamespace(name=name, row_invariant=True)
        assert are_rows_exact(kernels, dense)  # type: ignore[arg-type]
        assert are_rows_exact(kernels, experts) is is_exact  # type: ignore[arg-type]
    assert not are_rows_exact(SimpleNamespace(name="torch", row_invariant=False), dense)  # type: ignore[arg-type]


def test_an_answer_under_synthetic_acceptance_says_so() -> None:
    target = TableTarget(torch.eye(5).roll(1, dims=1) * 9)
    drafter = ScriptedProposer([[0, 1, 2, 3, 4] * 9], vocab_size=5)
    llm = make_llm(target, proposer=drafter, synthetic_acceptance_length=3)
    assert llm.generate([[0]], SHORT)[0].synthetic
    assert not llm.without_drafter().generate([[0]], SHORT)[0].synthetic


def test_the_shipped_drafter_belongs_to_the_embedded_default() -> None:
    assert drafter_path(None, target=None) is None
    assert drafter_path("auto", target="embedded") == drafter_path("auto", target=None)
    assert drafter_path("auto", target="/some/target") is None
    assert drafter_path("/some/where", target="/some/target") == Path("/some/where")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_drafter_changes_drafts_and_no_text(kind: str, tmp_path: Path) -> None:
    """A copy in plain numbers is rounded: those of the shipped drafter are packed already, and would stay."""
    folder = str(unpacked_drafter(tmp_path / "drafter"))
    config, params = EngineConfig(max_seats=1, context_length=128), SamplingParams(max_tokens=24, ignore_eos=True)
    llm = load(drafter=folder, drafter_quantization=kind, config=config, device="cpu")
    drafted, plain = (each.generate(TEST.prompts[:2], params) for each in (llm, plain_llm()))
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert sum(each.acceptance.num_accepted_tokens for each in drafted) > 0


@pytest.mark.slow
def test_what_rounding_the_drafter_costs_in_acceptance(tmp_path: Path) -> None:
    """On the golden prompts: int8 loses nothing to speak of, int4 less than a tenth."""
    folder = str(unpacked_drafter(tmp_path / "drafter"))
    config = EngineConfig(max_seats=1, context_length=256)
    lengths = {}
    for kind in (None, "int8", "int4"):
        llm = load(drafter=folder, drafter_quantization=kind, config=config, device="cpu")
        answers = llm.generate(TEST.prompts, SamplingParams(max_tokens=96, ignore_eos=True))
        lengths[kind] = metrics.mean_acceptance_length(metrics.pool(each.acceptance for each in answers))
    whole, int8, int4 = lengths.values()
    assert whole is not None
    assert int8 is not None
    assert int4 is not None
    assert int8 > 0.98 * whole, lengths
    assert int4 > 0.9 * whole, lengths


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"drafter_quantization": "int3"}, "drafter_quantization='int3' is unknown; choose one of int8, int4"),
        ({"drafter": None, "drafter_quantization": "int8"}, "drafter_quantization='int8', but there is no drafter"),
    ],
)
def test_a_quantisation_that_cannot_be_is_refused_before_weights_are_read(
    options: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "load_checkpoint", lambda *given, **how: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match=problem):
        load(**options)
