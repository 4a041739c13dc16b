"""Drafters against their originals: what z-lab's, DeepSpec's, speculators' and vLLM's own code computes, ours computes.

Fixtures: tests/golden/drafters/, made by tools/golden_drafters.py. Ours reads the files as the original publishes them
and drafts five blocks in one pass, after contexts below and past the window. A wrong drafter costs only speed, so every
mistake that is easy to make is planted here, one at a time, and must show.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.kernels.reference import TorchKernels, soft_cap
from outrider.models.attention import LayerCaches, Rows, allocate_caches
from outrider.models.dflash import DFlashDrafter
from outrider.models.draft_layers import BlockRows, DraftLayer
from outrider.models.drafter_config import BlockLayout, MarkovKind
from outrider.models.dspark import MarkovHead
from outrider.models.gemma import GemmaTarget
from outrider.models.layers import AttentionWeights
from outrider.models.registry import load_drafter, load_target
from outrider.weights.loader import load_checkpoint
from outrider.weights.packed import DenseWeight
from tests.toy import CPU, toy_checkpoint, toy_target_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "drafters"
ZLAB = ["zlab-dflash", "zlab-dflash-causal", "vllm-dflash-causal", "hybrid-root"]
DEEPSPEC_GEMMA4 = ["deepspec-gemma4-vanilla", "deepspec-gemma4-gated", "deepspec-gemma4-rnn"]
SPECULATORS = ["speculators-dflash", "speculators-dflash-two-way", "speculators-dspark"]
GEMMAS = [*ZLAB, *DEEPSPEC_GEMMA4]  # trained with Gemma's scaled embeddings and its soft-cap
WINDOWED = [*ZLAB, *SPECULATORS]
CASES = [*ZLAB, *DEEPSPEC_GEMMA4, "deepspec-qwen3", *SPECULATORS]
MARKOV_CASES = ["hybrid-root", *DEEPSPEC_GEMMA4, "deepspec-qwen3", "speculators-dspark"]
WITH_TARGET = "zlab-dflash"
TARGET_LAYER_IDS = (1, 3, 4)
TOLERANCE = 1e-5  # of the largest number; the originals ran in float32, ours runs in float64
MIN_MUTANT_ERROR = 100 * TOLERANCE
CONTEXT_LENGTH, MAX_ROWS = 64, 8  # few enough rows a pass for the caches of sliding layers to wrap around
KERNELS = TorchKernels(torch.float64)


@cache
def golden(case: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / case / "golden.safetensors")


@cache
def facts(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "golden.json").read_text())


@cache
def target_of(case: str) -> GemmaTarget:
    """The target that the fixture stores, or a toy with its embedding, if the drafter brings none."""
    options: dict[str, Any] = {
        "kernels": KERNELS,
        "dtype": torch.float64,
        "device": CPU,
        "context_length": CONTEXT_LENGTH,
    }
    if case == WITH_TARGET:
        return load_target(load_checkpoint(GOLDEN / case / "target"), **options)
    config = toy_target_config()
    checkpoint = toy_checkpoint(config)
    if "embed_tokens" in golden(case):
        name = "model.embed_tokens.weight"
        checkpoint.tensors[name] = DenseWeight(name, golden(case)["embed_tokens"])  # type: ignore[index]
    return GemmaTarget(config, checkpoint, **options)


def drafter_of(case: str) -> DFlashDrafter:
    return load_drafter(GOLDEN / case / "drafter", target_of(case), target_name="target", context_length=CONTEXT_LENGTH)


def context(drafter: DFlashDrafter, case: str, taps: Tensor) -> LayerCaches:
    """Caches with one seat a block, each holding the rows before its anchor, written a few at a time."""
    positions = golden(case)["anchor_positions"]
    caches = allocate_caches(
        drafter.config.layers,
        num_seats=len(positions),
        context_length=CONTEXT_LENGTH,
        max_rows=MAX_ROWS,
        dtype=torch.float64,
        device=CPU,
    )
    for rows in torch.arange(len(taps)).split(MAX_ROWS - 1):
        seats, columns = (rows < positions[:, None]).nonzero(as_tuple=True)
        drafter.write_context(taps[rows[columns]].double(), seats, rows[columns], caches)
    return caches


def block_of(drafter: DFlashDrafter, case: str, *, shift: int = 0) -> BlockRows:
    """All blocks of the fixture, their anchors `shift` positions later."""
    tensors = golden(case)
    seats, num_drafts = torch.arange(len(tensors["anchor_positions"])), tensors["base_logits"].shape[1]
    return drafter.block(tensors["anchor_token_ids"], seats, tensors["anchor_positions"] + shift, num_drafts=num_drafts)


def base_error(drafter: DFlashDrafter, case: str, *, shift: int = 0, taps: Tensor | None = None) -> float:
    """How far our logits are from the original's before any Markov head, relative to the largest."""
    caches = context(drafter, case, golden(case)["taps"] if taps is None else taps)
    logits = drafter.base_logits(drafter.hidden(block_of(drafter, case, shift=shift), caches))
    return relative_error(logits, golden(case)["base_logits"])


def corrected_error(drafter: DFlashDrafter, case: str, previous: Tensor | None = None) -> float:
    """The same with the Markov head, which is told the tokens that the original was told."""
    caches = context(drafter, case, golden(case)["taps"])
    told = golden(case)["previous_token_ids"] if previous is None else previous
    return relative_error(drafter.draft_logits(block_of(drafter, case), caches, told)[0], golden(case)["logits"])


def relative_error(ours: Tensor, original: Tensor) -> float:
    assert ours.shape == original.shape
    return float((ours - original).abs().max() / original.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_originals(case: str) -> None:
    assert golden(case)["base_logits"].std() > 0.5
    assert base_error(drafter_of(case), case) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_a_config_says_what_its_original_makes_of_it(case: str) -> None:
    config = drafter_of(case).config
    assert config.target_layer_ids == TARGET_LAYER_IDS  # those of speculators count one more
    assert config.max_draft_length == golden(case)["base_logits"].shape[1]
    stated = facts(case)
    assert list(config.layer_is_causal) == stated.get("layer_is_causal", list(config.layer_is_causal))
    assert stated.get("aux_layers", [2, 4, 5]) == [layer_id + 1 for layer_id in TARGET_LAYER_IDS]  # vLLM's count


@pytest.mark.parametrize("case", CASES)
def test_a_fixture_names_its_original_and_every_deviation(case: str) -> None:
    found = facts(case)
    assert re.search(r"\d\.\d|@[0-9a-f]{7}", found["original"])
    assert found["run"]
    assert isinstance(found["deviations"], list)
    assert isinstance(found["seed"], int)


@pytest.mark.parametrize("case", MARKOV_CASES)
def test_corrected_logits_and_confidences_are_the_originals(case: str) -> None:
    drafter, tensors = drafter_of(case), golden(case)
    caches = context(drafter, case, tensors["taps"])
    logits, confidences = drafter.draft_logits(block_of(drafter, case), caches, tensors["previous_token_ids"])
    assert relative_error(logits, tensors["logits"]) < TOLERANCE
    assert (confidences is None) == ("confidences" not in tensors)
    if confidences is not None:
        assert relative_error(confidences, tensors["confidences"]) < TOLERANCE


@pytest.mark.parametrize("case", MARKOV_CASES)
def test_a_walk_drafts_what_the_original_drafts(case: str) -> None:
    drafter, tensors = drafter_of(case), golden(case)
    block, caches = block_of(drafter, case), context(drafter, case, tensors["taps"])
    walk = drafter.walk(block, caches, num_candidates=drafter.config.draft_vocab_size)
    token_ids, drafts = tensors["anchor_token_ids"], []
    for _ in range(tensors["greedy_drafts"].shape[1]):
        token_ids = walk.step(token_ids).ids[:, 0]
        drafts.append(token_ids)
    assert torch.equal(torch.stack(drafts, dim=1), tensors["greedy_drafts"])


def test_the_hybrid_without_its_head_is_its_backbone(tmp_path: Path) -> None:
    case = "hybrid-root"
    config = json.loads((GOLDEN / case / "drafter" / "config.json").read_text())
    kept = {name: value for name, value in config.items() if not name.startswith("markov")}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    tensors = load_file(GOLDEN / case / "drafter" / "model.safetensors")
    backbone = {name: tensor for name, tensor in tensors.items() if not name.startswith("markov_head.")}
    assert len(backbone) < len(tensors)
    save_file(backbone, tmp_path / "model.safetensors")
    drafter = load_drafter(tmp_path, target_of(case), target_name="target", context_length=CONTEXT_LENGTH)
    assert drafter.config.markov is None
    assert base_error(drafter, case) < TOLERANCE


def taps_of_target(layer_ids: tuple[int, ...]) -> Tensor:
    """Our target's taps over the fixture's text, in chunks over caches."""
    target, token_ids = target_of(WITH_TARGET), golden(WITH_TARGET)["token_ids"]
    caches = allocate_caches(
        target.config.layers,
        num_seats=1,
        context_length=CONTEXT_LENGTH,
        max_rows=MAX_ROWS,
        dtype=torch.float64,
        device=CPU,
    )
    taps = []
    for rows in torch.arange(len(token_ids)).split(MAX_ROWS - 1):
        output = target.forward(Rows(token_ids[rows], torch.zeros_like(rows), rows), caches, tap_layers=layer_ids)
        assert output.taps is not None
        taps.append(output.taps)
    return torch.cat(taps)


def test_taps_of_our_target_are_the_originals() -> None:
    taps = taps_of_target(drafter_of(WITH_TARGET).config.target_layer_ids)
    assert relative_error(taps, golden(WITH_TARGET)["taps"]) < TOLERANCE
    assert base_error(drafter_of(WITH_TARGET), WITH_TARGET, taps=taps) < TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_of_neighbouring_layers_show(shift: int) -> None:
    taps = taps_of_target(tuple(layer_id + shift for layer_id in TARGET_LAYER_IDS))
    assert base_error(drafter_of(WITH_TARGET), WITH_TARGET, taps=taps) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", CASES)
def test_embeddings_scaled_otherwise_show(case: str) -> None:
    drafter = drafter_of(case)
    is_scaled = case in GEMMAS
    drafter.config = replace(drafter.config, embedding_scale=1.0 if is_scaled else None)
    assert base_error(drafter, case) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", [*DEEPSPEC_GEMMA4, "deepspec-qwen3"])
def test_the_targets_embedding_for_the_drafters_own_shows(case: str) -> None:
    drafter = drafter_of(case)
    drafter.embedding = drafter.target.embedding
    assert base_error(drafter, case) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", [*DEEPSPEC_GEMMA4, "deepspec-qwen3", *SPECULATORS])
def test_the_targets_head_for_the_drafters_own_shows(case: str) -> None:
    drafter = drafter_of(case)
    rows = drafter.draft_to_target
    drafter.head = drafter.target.embedding if rows is None else drafter.target.embedding[rows]
    assert base_error(drafter, case) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", GEMMAS)
def test_a_missing_soft_cap_shows(case: str) -> None:
    drafter = drafter_of(case)
    drafter.config = replace(drafter.config, final_logit_softcapping=None)
    assert base_error(drafter, case) > MIN_MUTANT_ERROR


def with_sight(layer: DraftLayer, **changes: Any) -> DraftLayer:
    return replace(layer, sight=replace(layer.sight, **changes))


@pytest.mark.parametrize("layer_index", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_flipped_causality_of_one_layer_shows(case: str, layer_index: int) -> None:
    drafter = drafter_of(case)
    layer = drafter.layers[layer_index]
    drafter.layers[layer_index] = with_sight(layer, is_causal=not layer.sight.is_causal)
    assert base_error(drafter, case) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("case", WINDOWED)
def test_a_window_off_by_one_shows(case: str, by: int) -> None:
    drafter = drafter_of(case)
    windows = [layer.sight.window for layer in drafter.layers]
    assert windows == [8, 8, None]
    drafter.layers[0] = with_sight(drafter.layers[0], window=8 + by)
    assert base_error(drafter, case) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", WINDOWED)
def test_a_window_that_counts_from_elsewhere_shows(case: str) -> None:
    drafter = drafter_of(case)
    assert drafter.layers[0].sight.from_anchor == (case in SPECULATORS)
    drafter.layers[0] = with_sight(drafter.layers[0], from_anchor=not drafter.layers[0].sight.from_anchor)
    assert base_error(drafter, case) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", CASES)
def test_context_through_the_input_norm_shows(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, write = drafter_of(case), AttentionWeights.write_keys_values
    norms = {id(layer.attention): layer.input_norm for layer in drafter.layers}

    def normed(self: AttentionWeights, hidden: Tensor, *args: Any, kernels: Any, eps: float) -> None:
        hidden = kernels.rms_norm(hidden, norms[id(self)], eps=eps)
        write(self, hidden, *args, kernels=kernels, eps=eps)

    monkeypatch.setattr(AttentionWeights, "write_keys_values", normed)
    assert base_error(drafter, case) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("case", CASES)
def test_an_anchor_off_by_one_position_shows(case: str, shift: int) -> None:
    assert base_error(drafter_of(case), case, shift=shift) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", CASES)
def test_slots_shifted_by_one_show(case: str) -> None:
    drafter = drafter_of(case)
    (other,) = set(BlockLayout) - {drafter.config.layout}
    drafter.config = replace(drafter.config, layout=other)
    assert base_error(drafter, case) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", MARKOV_CASES)
def test_a_slots_own_token_for_the_one_before_shows(case: str) -> None:
    assert corrected_error(drafter_of(case), case, previous=golden(case)["greedy_drafts"]) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", ["hybrid-root", *DEEPSPEC_GEMMA4])
def test_a_soft_cap_on_the_markov_bias_shows(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, bias = drafter_of(case), MarkovHead.bias
    cap = drafter.config.final_logit_softcapping
    monkeypatch.setattr(MarkovHead, "bias", lambda self, latent: soft_cap(bias(self, latent), cap))
    assert corrected_error(drafter, case) > MIN_MUTANT_ERROR


def test_a_recurrent_state_that_is_forgotten_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, step = drafter_of("deepspec-gemma4-rnn"), MarkovHead.step
    monkeypatch.setattr(MarkovHead, "step", lambda self, embedded, hidden, state: step(self, embedded, hidden, None))
    assert corrected_error(drafter, "deepspec-gemma4-rnn") > MIN_MUTANT_ERROR


@pytest.mark.parametrize("case", ["deepspec-gemma4-gated", "deepspec-gemma4-rnn"])
def test_a_head_taken_for_a_simpler_one_shows(case: str) -> None:
    drafter = drafter_of(case)
    assert drafter.markov is not None
    drafter.markov = replace(drafter.markov, kind=MarkovKind.VANILLA)
    assert corrected_error(drafter, case) > MIN_MUTANT_ERROR
