"""The target against transformers' Gemma 3 and against a dense recompute, in one pass and across the window's edge."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from outrider.errors import WeightsError
from outrider.kernels.cpu import CpuKernels
from outrider.kernels.ops import Kernels
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import LayerCache, Rows, allocate_caches
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import load_target
from outrider.weights.loader import Checkpoint
from outrider.weights.packed import DenseWeight
from tests.toy import CPU, dense_hidden, dense_logits, toy_checkpoint, toy_target, toy_target_config

NUM_TOKENS = 29  # windows are 8
CONTEXT_LENGTH = 48
CHUNKINGS = [[NUM_TOKENS], [1] * NUM_TOKENS, [7, 1, 1, 5, 5, 5, 5], [12, 5, 1, 3, 8]]
TOLERANCE = 1e-4  # transformers takes norms and rotary tables in float32, whatever the dtype


def shrunken_config(num_kv_heads: int, **changes: Any) -> Gemma3TextConfig:
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    return Gemma3TextConfig(**{**shape, **changes}, attn_implementation="eager")


def random_model(config: Gemma3TextConfig, dtype: torch.dtype) -> Gemma3ForCausalLM:
    """All weights random, norms included; their spread is wide enough for every part to matter."""
    model = Gemma3ForCausalLM(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def as_checkpoint(model: Gemma3ForCausalLM) -> Checkpoint:
    tensors = {
        name: DenseWeight(name, value.detach().clone())
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    source = Path("shrunken")
    return Checkpoint(model.config.to_dict(), tensors, 1.0, source, source=source, source_sha256="")


def expected_outputs(model: Gemma3ForCausalLM, token_ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Output of every decoder layer, [R, N] each, and logits [R, V]."""
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _layer, _inputs, output: outputs.append(output.squeeze(0)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(token_ids[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return outputs, logits


def decode(target: GemmaTarget, token_ids: Tensor, chunks: list[int], caches: list[LayerCache] | None = None) -> Tensor:
    """Outputs of all layers side by side, [R, layers * N], computed in chunks of rows with a cache."""
    caches = caches or new_caches(target, max_rows=max(chunks))
    taps, start = [], 0
    for size in chunks:
        positions = torch.arange(start, start + size)
        rows = Rows(token_ids[start : start + size], torch.zeros(size, dtype=torch.int64), positions)
        output = target.forward(rows, caches, tap_layers=range(len(target.layers)))
        assert output.taps is not None
        assert torch.equal(output.hidden, output.taps[:, -target.config.hidden_size :])
        taps.append(output.taps)
        start += size
    return torch.cat(taps)


def new_caches(target: GemmaTarget, *, max_rows: int, num_seats: int = 1) -> list[LayerCache]:
    return allocate_caches(
        target.config.layers,
        num_seats=num_seats,
        context_length=CONTEXT_LENGTH,
        max_rows=max_rows,
        dtype=target.dtype,
        device=CPU,
    )


def kernel_set(name: str, request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    if name == "cpu":
        return request.getfixturevalue("cpu_kernels"), torch.float32
    dtype = getattr(torch, name)
    return TorchKernels(dtype), dtype


@pytest.mark.parametrize("kernel_name", ["float64", "float32", "cpu"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_agrees_with_transformers(kernel_name: str, num_kv_heads: int, request: pytest.FixtureRequest) -> None:
    kernels, dtype = kernel_set(kernel_name, request)
    model = random_model(shrunken_config(num_kv_heads, final_logit_softcapping=5.0), dtype)
    checkpoint = as_checkpoint(model)
    target = load_target(checkpoint, kernels=kernels, dtype=dtype, device=CPU, context_length=CONTEXT_LENGTH)
    token_ids = torch.randint(128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    layers, logits = expected_outputs(model, token_ids)
    for chunks in CHUNKINGS:
        outputs = decode(target, token_ids, chunks)
        for index, (ours, theirs) in enumerate(zip(outputs.chunk(7, dim=1), layers, strict=True)):
            error = float((ours - theirs).abs().max())
            assert error < TOLERANCE, f"layer {index}, chunks {chunks}"
        ours = target.logits(outputs[:, -64:])
        assert float((ours - logits).abs().max()) < TOLERANCE, f"logits, chunks {chunks}"


def test_chunks_give_the_same_bits_with_row_invariant_kernels(cpu_kernels: CpuKernels) -> None:
    target = toy_target(kernels=cpu_kernels, dtype=torch.float32)
    token_ids = torch.randint(96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    whole, *others = [decode(target, token_ids, chunks) for chunks in CHUNKINGS]
    assert all(torch.equal(whole, other) for other in others)


@pytest.mark.parametrize("chunks", CHUNKINGS, ids=str)
def test_layers_of_different_shapes_agree_with_a_dense_recompute(chunks: list[int]) -> None:
    target = toy_target()
    token_ids = torch.randint(96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    outputs = decode(target, token_ids, chunks)
    expected = dense_hidden(target, token_ids.tolist())
    torch.testing.assert_close(outputs, torch.cat(expected, dim=1), rtol=0, atol=1e-9)
    logits = target.logits(outputs[:, -32:])
    torch.testing.assert_close(logits, dense_logits(target, token_ids.tolist()), rtol=0, atol=1e-9)
    assert float(logits.abs().max()) <= 5.0


def test_rejected_rows_leave_no_trace() -> None:
    """Wrong rows after position 12 are overwritten by right ones, also where the window's slots have wrapped."""
    target = toy_target()
    token_ids = torch.randint(96, (24,), generator=torch.Generator().manual_seed(4))
    caches = new_caches(target, max_rows=12)
    decode(target, token_ids[:12], [12], caches)
    seats = torch.zeros(5, dtype=torch.int64)
    for start in (12, 14, 19):
        target.forward(Rows(95 - token_ids[start : start + 5], seats, torch.arange(start, start + 5)), caches)
        output = target.forward(Rows(token_ids[start : start + 5], seats, torch.arange(start, start + 5)), caches)
        expected = dense_hidden(target, token_ids[: start + 5].tolist())[-1][-5:]
        torch.testing.assert_close(output.hidden, expected, rtol=0, atol=1e-9)


def test_seats_share_a_pass_and_spare_rows_write_nothing() -> None:
    target = toy_target()
    texts = [torch.arange(3, 14), torch.arange(40, 46)]
    caches = new_caches(target, max_rows=11, num_seats=3)
    untouched = [copy.deepcopy(cache.keys[2]) for cache in caches]
    rows = Rows(
        torch.cat([*texts, torch.zeros(3, dtype=torch.int64)]),
        torch.tensor([0] * 11 + [1] * 6 + [-1] * 3),
        torch.cat([torch.arange(11), torch.arange(6), torch.zeros(3, dtype=torch.int64)]),
    )
    hidden = target.forward(rows, caches).hidden
    for text, ours in zip(texts, hidden[:17].split([11, 6]), strict=True):
        torch.testing.assert_close(ours, dense_hidden(target, text.tolist())[-1], rtol=0, atol=1e-9)
    assert all(torch.equal(cache.keys[2], before) for cache, before in zip(caches, untouched, strict=True))


def test_taps_come_in_the_order_asked_for_and_only_if_asked_for() -> None:
    target = toy_target()
    rows = Rows(torch.arange(5), torch.zeros(5, dtype=torch.int64), torch.arange(5))
    expected = dense_hidden(target, range(5))
    taps = target.forward(rows, new_caches(target, max_rows=5), tap_layers=(1, 3, 4)).taps
    torch.testing.assert_close(taps, torch.cat([expected[i] for i in (1, 3, 4)], dim=1), rtol=0, atol=1e-9)
    assert target.forward(rows, new_caches(target, max_rows=5)).taps is None


def test_embedding_scale_is_rounded_to_the_model_dtype() -> None:
    scale = toy_target(dtype=torch.bfloat16).embedding_scale
    assert scale == float(torch.tensor(32**0.5, dtype=torch.bfloat16))
    assert toy_target().embedding_scale == 32**0.5


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.3.self_attn.k_norm.weight"])
def test_missing_and_unknown_tensors_are_named(name: str) -> None:
    config = toy_target_config()
    checkpoint = toy_checkpoint(config)
    weight = checkpoint.tensors.pop(name)
    with pytest.raises(WeightsError, match=name):
        build(checkpoint)
    checkpoint.tensors.update({name: weight, "model.surprise.weight": weight})
    with pytest.raises(WeightsError, match=r"model\.surprise\.weight"):
        build(checkpoint)


def build(checkpoint: Checkpoint) -> GemmaTarget:
    kernels = TorchKernels(torch.float64)
    return GemmaTarget(
        toy_target_config(), checkpoint, kernels=kernels, dtype=torch.float64, device=CPU, context_length=8
    )
