"""Gemma 4 31B at its full size on a GPU, with random weights and a random drafter of z-lab's shape.

62.5 GB of weights fit no small disk: headers come from the name plan, and each tensor is made on the GPU when the
loader asks for it, as it would read it from a shard. So names, shapes, memory and the decoding loop are the real ones.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from outrider.backends.local import CUDA_ROWS_PER_PASS, make_engine
from outrider.core import SamplingParams
from outrider.engine.engine import Engine, EngineConfig
from outrider.kernels.reference import TorchKernels
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import drafter_config, load_target
from outrider.weights.layouts import Header
from outrider.weights.loader import Checkpoint
from outrider.weights.name_plan import read_name_plan
from outrider.weights.safetensors_dir import StoredWeights, read_config
from tests.plans import plan_path
from tests.scripted import ScriptedProposer

TARGET, DRAFTER = plan_path("gemma-4-31B-it"), plan_path("gemma-4-31B-it-DFlash")
CONFIG = EngineConfig(
    context_length=2048, max_seats=1, rows_per_pass=CUDA_ROWS_PER_PASS, prefill_rows=CUDA_ROWS_PER_PASS
)
PROMPT = [(7919 * i + 11) % 200_000 for i in range(1060)]  # past the window of 1024
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
CUDA = torch.device("cuda")


def random_reader(headers: Mapping[str, Header]) -> Callable[[str], Tensor]:
    """Reads a tensor of noise: matrices keep the size of what passes through them, factors are about 1."""

    def read(name: str) -> Tensor:
        shape = headers[name].shape
        generator = torch.Generator(CUDA).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16)
        return 1.0 + 0.1 * noise if len(shape) < 2 else noise * shape[-1] ** -0.5

    return read


def random_weights(headers: Mapping[str, Header], *, source: str) -> StoredWeights:
    return StoredWeights(headers, random_reader(headers), None, source=plan_path(source))


@functools.cache
def target() -> GemmaTarget:
    headers = read_name_plan(TARGET).headers
    weights = random_weights(headers, source=TARGET.name)
    checkpoint = Checkpoint(read_config(TARGET), weights, 0.0, TARGET, source=TARGET, source_sha256=None)
    kernels = TorchKernels(torch.bfloat16, CUDA)
    return load_target(
        checkpoint, kernels=kernels, dtype=torch.bfloat16, device=CUDA, context_length=CONFIG.context_length
    )


def random_drafter() -> DFlashDrafter:
    model = target()
    weights = random_weights(read_name_plan(DRAFTER).headers, source=DRAFTER.name)
    declared = drafter_config(read_config(DRAFTER), source=DRAFTER)
    return DFlashDrafter(
        declared, weights, model, kernels=model.kernels, context_length=CONFIG.context_length, source=DRAFTER
    )


def engine(drafter: DFlashDrafter | None) -> Engine:
    return make_engine(target(), drafter, None, CONFIG)


def run(engine: Engine) -> tuple[list[int], int]:
    """The text of the prompt, and how many drafts were accepted."""
    request = engine.add(PROMPT, GREEDY)
    while engine.has_work:
        engine.step()
    assert request.finish_reason == "length"
    return request.output_token_ids, request.acceptance.num_accepted_tokens


@functools.cache
def plain_text() -> tuple[int, ...]:
    return tuple(run(engine(None))[0])


@pytest.mark.gpu
def test_31b_generates_the_same_with_a_drafter_of_z_labs_shape() -> None:
    drafter = random_drafter()
    assert drafter.config.layer_is_causal == (True, True, True, True, False)
    assert drafter.config.max_draft_length == 15
    text, _ = run(engine(drafter))
    assert tuple(text) == plain_text()
    assert len(set(text)) > 5  # it is no single token for ever


@pytest.mark.gpu
def test_31b_generates_the_same_when_drafts_are_accepted() -> None:
    """Random weights accept nothing of a random drafter: here the drafts are the text itself, spoiled in places."""
    drafts = ScriptedProposer(
        [[*PROMPT, *plain_text()]], script=(3, 0, 15, 7), max_draft_length=15, vocab_size=262_144, tap_layers=(1,)
    )
    scripted = engine(None)
    scripted.use_proposer(drafts)  # not an engine of another make: constant shapes are those of one plan of pages
    text, num_accepted = run(scripted)
    assert tuple(text) == plain_text()
    assert num_accepted >= 20
