"""T-014: a window's ring stays within window + rows of a pass, and each row sees exactly its last W positions.

Seen red: num_cache_slots returning the window alone; causal_spans starting one position early.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.kernels.reference import TorchKernels
from outrider.models.attention import LayerCache
from outrider.models.gemma import GemmaTarget
from tests.cases.common import fresh_caches, text_rows
from tests.toy import CPU, WINDOW, dense_hidden, toy_checkpoint, toy_target, toy_target_config

PASS_ROWS = 5
NUM_ADDS = 200


def text(num_tokens: int) -> list[int]:
    return [(7 * i * i + 3 * i) % 96 for i in range(num_tokens)]


def add(target: GemmaTarget, caches: list[LayerCache], token_ids: list[int], start: int) -> torch.Tensor:
    """Outputs of all layers for one pass, [R, layers * N]."""
    rows = text_rows(token_ids[start : start + PASS_ROWS], start)
    output = target.forward(rows, caches, tap_layers=range(len(target.config.layers)))
    assert output.taps is not None
    return output.taps


@pytest.mark.parametrize("start_length", range(13))
def test_t014_every_row_sees_its_window(start_length: int) -> None:
    target = toy_target()
    token_ids = text(start_length + 3 * PASS_ROWS)
    caches = fresh_caches(target.config.layers, max_rows=PASS_ROWS)
    for start in range(0, start_length, PASS_ROWS):
        add(target, caches, token_ids[:start_length], start)
    expected = torch.cat(dense_hidden(target, token_ids), dim=-1)
    for start in range(start_length, len(token_ids), PASS_ROWS):
        found = add(target, caches, token_ids, start)
        torch.testing.assert_close(found, expected[start : start + PASS_ROWS], rtol=0, atol=1e-10)


def test_t014_memory_stays_flat() -> None:
    config = replace(toy_target_config(), layers=toy_target_config().layers[:1])  # one window, for speed
    target = GemmaTarget(
        config,
        toy_checkpoint(config),
        kernels=TorchKernels(torch.float64),
        dtype=torch.float64,
        device=CPU,
        context_length=NUM_ADDS * PASS_ROWS,
    )
    token_ids = text(NUM_ADDS * PASS_ROWS)
    caches = fresh_caches(target.config.layers, context_length=len(token_ids), max_rows=PASS_ROWS)
    stored = [(each.data_ptr(), each.shape) for cache in caches for each in cache.tensors]
    for start in range(0, len(token_ids), PASS_ROWS):
        found = add(target, caches, token_ids, start)
    assert [(each.data_ptr(), each.shape) for cache in caches for each in cache.tensors] == stored
    assert caches[0].keys.shape[1] <= WINDOW + PASS_ROWS
    expected = torch.cat(dense_hidden(target, token_ids), dim=-1)[-PASS_ROWS:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
