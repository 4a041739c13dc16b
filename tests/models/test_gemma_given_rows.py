"""Rows that bring their embedding, against transformers' Gemma 4 with an image's features in its prompt.

transformers is given finished features, so that no vision tower runs, and attends causally as it does for E2B and E4B.
Seen red: given rows scaled; the placeholder's own per-layer embedding, and that of token 0; the pad token's
projection in place of the given row's; spare rows multiplied by the mask instead of left out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Gemma4Config, Gemma4Model
from transformers.modeling_outputs import BaseModelOutputWithPooling

from outrider.kernels.cpu import CpuKernels
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import GivenRows, Rows
from outrider.models.gemma import GemmaTarget
from outrider.models.multimodal import row_positions
from outrider.models.registry import load_target
from tests.models.test_gemma import new_caches
from tests.models.test_gemma_gemma4 import (
    CONTEXT_LENGTH,
    SIZE,
    TOLERANCE,
    VOCAB,
    as_checkpoint,
    relative_error,
    shrunken_model,
)
from tests.toy import CPU, toy_target

IMAGE_ID, PAD_ID = 100, 7
IMAGE = slice(4, 15)  # wider than the window of 8
NUM_ROWS = 24
CHUNKINGS = ([NUM_ROWS], [6, 6, 6, 6], [1] * NUM_ROWS)


def given_prompt() -> tuple[Tensor, GivenRows]:
    """Text with an image in the middle; NaN wherever no embedding is given."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(VOCAB - 40, (NUM_ROWS,), generator=generator)
    token_ids[IMAGE] = IMAGE_ID
    embeddings = torch.full((NUM_ROWS, SIZE), torch.nan, dtype=torch.float64)
    embeddings[IMAGE] = torch.randn(11, SIZE, generator=generator, dtype=torch.float64)
    return token_ids, GivenRows(token_ids == IMAGE_ID, embeddings)


def decode_given(target: GemmaTarget, token_ids: Tensor, given: GivenRows, chunks: list[int]) -> list[Tensor]:
    """Output [R, N] of every layer."""
    caches, taps, start = new_caches(target, max_rows=max(chunks)), [], 0
    for size in chunks:
        positions = row_positions(NUM_ROWS)[start : start + size]
        rows = Rows(token_ids[start : start + size], positions * 0, positions, given.cut(start, size))
        taps.append(target.forward(rows, caches, tap_layers=range(len(target.layers))).taps)
        start += size
    return list(torch.cat([each for each in taps if each is not None]).split(target.config.hidden_size, dim=1))


def expected_layers(shape: str, token_ids: Tensor, given: GivenRows) -> tuple[list[Tensor], GemmaTarget]:
    """What transformers makes of the same prompt, and our target with the same weights."""
    text = shrunken_model(shape, torch.float64)
    text.config.pad_token_id = PAD_ID
    ids = {"image_token_id": IMAGE_ID, "audio_token_id": 101, "video_token_id": 102}
    config = Gemma4Config(text_config=text.config.to_dict(), vision_config=None, audio_config=None, **ids)
    whole = Gemma4Model(config).to(torch.float64).eval()
    whole.language_model.load_state_dict(text.model.state_dict())
    features = BaseModelOutputWithPooling(pooler_output=[given.embeddings[IMAGE]])  # type: ignore[arg-type]
    outputs: list[Tensor] = []
    for layer in whole.language_model.layers:
        layer.register_forward_hook(lambda _layer, _inputs, output: outputs.append(output.squeeze(0)))
    with torch.no_grad():
        whole(input_ids=token_ids[None], mm_encoder_outputs={"image": features})
    kernels = TorchKernels(torch.float64)
    place = {"dtype": torch.float64, "device": CPU, "context_length": CONTEXT_LENGTH}
    target = load_target(as_checkpoint(text), kernels=kernels, **place)  # type: ignore[arg-type]
    return outputs, target


@pytest.mark.parametrize("shape", ["E2B", "E4B", "31B"])
def test_agrees_with_transformers(shape: str) -> None:
    token_ids, given = given_prompt()
    expected, target = expected_layers(shape, token_ids, given)
    assert target.config.pad_token_id == PAD_ID
    for chunks in CHUNKINGS:
        ours = decode_given(target, token_ids, given, chunks)
        worst = max(relative_error(*pair) for pair in zip(ours, expected, strict=True))
        assert worst < TOLERANCE, chunks


def test_the_pad_tokens_per_layer_embedding_matters() -> None:
    """Or the agreement above would say nothing about it."""
    token_ids, given = given_prompt()
    expected, target = expected_layers("E2B", token_ids, given)
    target.config = replace(target.config, pad_token_id=PAD_ID + 1)
    ours = decode_given(target, token_ids, given, [NUM_ROWS])
    assert relative_error(ours[-1], expected[-1]) > 1e-2


def test_chunks_give_the_same_bits_with_row_invariant_kernels(cpu_kernels: CpuKernels) -> None:
    token_ids, given = given_prompt()
    given = GivenRows(given.is_given, given.embeddings.float())
    place = {"kernels": cpu_kernels, "dtype": torch.float32, "device": CPU, "context_length": CONTEXT_LENGTH}
    target = load_target(as_checkpoint(shrunken_model("E2B", torch.float32)), **place)  # type: ignore[arg-type]
    whole, *others = [decode_given(target, token_ids, given, chunks)[-1] for chunks in CHUNKINGS]
    assert bool(whole.isfinite().all())
    assert all(torch.equal(whole, other) for other in others)


def test_tokens_own_embeddings_given_change_no_bit() -> None:
    target = toy_target()
    token_ids, nobody = torch.arange(NUM_ROWS), torch.full((NUM_ROWS, 32), torch.nan, dtype=torch.float64)
    plain = target.forward(Rows(token_ids, token_ids * 0, token_ids), new_caches(target, max_rows=NUM_ROWS)).hidden
    for is_given, embeddings in ((token_ids < 0, nobody), (token_ids >= 0, target.embed(token_ids))):
        ours = decode_given(target, token_ids, GivenRows(is_given, embeddings), [NUM_ROWS])
        assert torch.equal(ours[-1], plain)
