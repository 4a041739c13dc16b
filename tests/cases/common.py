"""What several cases share: toy engines, hand-made batches, states to compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.proposer import DFlashProposer
from outrider.models.attention import LayerCache, Rows, allocate_caches
from outrider.models.config import LayerSpec
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget, TargetOutput
from tests.scripted import TableTarget
from tests.toy import CPU


def fresh_caches(layers: Sequence[LayerSpec], *, context_length: int = 128, max_rows: int = 64) -> list[LayerCache]:
    """Empty float64 caches for one seat."""
    return allocate_caches(
        layers, num_seats=1, context_length=context_length, max_rows=max_rows, dtype=torch.float64, device=CPU
    )


def text_rows(token_ids: Sequence[int], first_position: int = 0) -> Rows:
    """Rows of seat 0 for a piece of text."""
    positions = torch.arange(first_position, first_position + len(token_ids))
    return Rows(torch.tensor(token_ids), torch.zeros_like(positions), positions)


def text_taps(target: GemmaTarget, token_ids: Sequence[int], tap_layers: Sequence[int]) -> Tensor:
    """Taps [T, taps * N] of a text that starts at position 0, computed in one pass on caches of its own."""
    output = target.forward(text_rows(token_ids), fresh_caches(target.config.layers), tap_layers=tap_layers)
    assert output.taps is not None
    return output.taps


def one_request(anchor_token_id: int, anchor_position: int, draft_length: int) -> CycleBatch:
    """A greedy batch of one, in seat 0."""
    return CycleBatch(
        seats=torch.tensor([0]),
        anchor_token_ids=torch.tensor([anchor_token_id]),
        anchor_positions=torch.tensor([anchor_position]),
        draft_lengths=torch.tensor([draft_length]),
        host_positions=(anchor_position,),
        host_lengths=(draft_length,),
        params=(SamplingParams(),),
        noise_seeds=(0,),
        adjustments=(None,),
        outputs=((),),
    )


def toy_proposer(drafter: DFlashDrafter, *, num_seats: int = 1, context_length: int = 128) -> DFlashProposer:
    """F2 behind the engine's interface, with empty caches."""
    caches = allocate_caches(
        drafter.config.layers,
        num_seats=num_seats,
        context_length=context_length,
        max_rows=64,
        dtype=torch.float64,
        device=CPU,
    )
    return DFlashProposer(drafter, caches)


def snapshot(caches: Sequence[LayerCache]) -> list[Tensor]:
    """Copies of all keys and values."""
    return [each.clone() for cache in caches for each in cache[:2]]


class TextTarget(TableTarget):
    """F5 by position: whatever it reads, it wants the token that `text` has next (0 after its end)."""

    def __init__(self, text: Sequence[int], *, vocab_size: int = 272) -> None:
        wanted = torch.tensor([*text[1:], *[0] * 128])
        super().__init__(functional.one_hot(wanted, vocab_size) * 20.0)
        self.config.vocab_size = vocab_size

    def forward(
        self, rows: Rows, caches: Sequence[LayerCache], *, tap_layers: Sequence[int] = (), **_options: Any
    ) -> TargetOutput:
        """Hidden states are positions, [R, 1]."""
        output = super().forward(rows, caches, tap_layers=tap_layers)
        return TargetOutput(rows.positions[:, None].to(self.dtype), output.taps)


class ByteTokenizer:
    """F6 as far as engines use it: ids below 256 are ASCII characters, the others are control tokens."""

    vocab_size = 272
    special_ids = frozenset(range(256, 272))
    byte_ids: frozenset[int] = frozenset()  # nothing is kept back

    def __init__(self, eos_ids: Sequence[int] = (257,)) -> None:
        self.eos_ids = tuple(eos_ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids."""
        return "".join(chr(token_id) for token_id in token_ids if token_id < 256)
