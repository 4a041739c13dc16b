"""Running the target over dense grids of text, where every sequence of a batch is at the same position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.errors import ConfigError
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import LayerCaches, Rows, allocate_caches
from outrider.models.gemma import GemmaTarget


class GridKernels(TorchKernels):
    """Torch kernels for rows that form a grid [sequences, positions], all sequences at the same positions.

    Attention, norms and activations are then one fused call each over whole tensors; nothing else changes.
    """

    name = "torch-grid"
    first_position = 0
    num_positions = 1

    def rms_norm(self, inputs: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """One fused call, float32 inside."""
        return functional.rms_norm(inputs.float(), weight.shape, weight, eps).to(inputs.dtype)

    def gated_linear(self, inputs: Tensor, gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
        """In the tensors' own dtype; torch's activations are float32 inside."""
        gated = functional.linear(inputs, gate)
        activated = functional.silu(gated) if activation == "silu" else functional.gelu(gated, approximate="tanh")
        return activated * functional.linear(inputs, up)

    def write_cache(self, cache: LayerCache, keys: Tensor, values: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Store a grid of keys and values [S * P, G, D] at positions first_position .. + P of every seat."""
        del seats, positions  # a grid's are known
        where = slice(self.first_position, self.first_position + self.num_positions)
        for stored, fresh in ((cache.keys, keys), (cache.values, values)):  # a page a seat
            stored[:, where] = fresh.view(stored.shape[0], self.num_positions, *fresh.shape[1:])

    def attention(self, queries: Tensor, cache: LayerCache, spans: Tensor, **options: Any) -> Tensor:
        """Causal attention of a grid of queries over all positions up to each one's own."""
        del spans  # a grid's are known
        end = self.first_position + self.num_positions
        grid = queries.view(cache.keys.shape[0], self.num_positions, *queries.shape[1:]).transpose(1, 2)
        keys, values = (stored[:, :end].transpose(1, 2) for stored in (cache.keys, cache.values))
        # A full grid is causal; a single position sees everything stored.
        attended = functional.scaled_dot_product_attention(
            grid, keys, values, is_causal=self.num_positions > 1, scale=options["scale"], enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(queries.shape)


@dataclass(frozen=True)
class Taps:
    """Outputs of some target layers over texts."""

    values: Tensor  # [S, P, layers * N]
    layers: tuple[int, ...]

    def of(self, layers: tuple[int, ...]) -> Tensor:
        """Those of the asked layers, in the order asked, [S, P, layers * N]."""
        if layers == self.layers:
            return self.values
        columns = self.values.chunk(len(self.layers), dim=-1)
        return torch.cat([columns[self.layers.index(layer)] for layer in layers], dim=-1)


class GridRunner:
    """A target and caches for `num_sequences` texts of at most `num_positions` tokens."""

    def __init__(self, target: GemmaTarget, *, num_sequences: int, num_positions: int) -> None:
        window = min((spec.window for spec in target.config.layers if spec.window), default=num_positions)
        if num_positions > window:
            raise ConfigError(f"sequence_tokens={num_positions} exceeds the target's sliding window of {window}.")
        self.target, self.num_sequences, self.num_positions = target, num_sequences, num_positions
        self.caches = allocate_caches(
            target.config.layers,
            num_seats=num_sequences,
            context_length=num_positions,
            max_rows=num_positions,
            dtype=target.dtype,
            device=target.device,
        )
        self.seats = torch.arange(num_sequences, device=target.device)

    def _set_grid(self, *, first_position: int, num_positions: int) -> None:
        kernels = self.target.kernels
        if isinstance(kernels, GridKernels):
            kernels.first_position, kernels.num_positions = first_position, num_positions

    def step(self, token_ids: Tensor, position: int, tap_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """One token of every sequence, int64 [S], at `position` -> logits [S, V] and taps [S, taps * N] if asked."""
        self._set_grid(first_position=position, num_positions=1)
        rows = Rows(token_ids, self.seats, torch.full_like(token_ids, position))
        output = self.target.forward(rows, self.caches, tap_layers=tap_layers)
        return self.target.logits(output.hidden), output.taps

    def taps(self, token_ids: Tensor, tap_layers: tuple[int, ...]) -> Tensor:
        """Whole texts, int64 [S, P], S up to num_sequences -> taps [S, P, taps * N]."""
        num_sequences, num_positions = token_ids.shape
        token_ids = token_ids.to(torch.int64)
        self._set_grid(first_position=0, num_positions=num_positions)
        positions = torch.arange(num_positions, device=token_ids.device).repeat(num_sequences)
        seats = self.seats[:num_sequences].repeat_interleave(num_positions)
        caches = LayerCaches(
            LayerCache(cache.keys[:num_sequences], cache.values[:num_sequences], cache.table[:num_sequences])
            for cache in self.caches
        )
        output = self.target.forward(Rows(token_ids.reshape(-1), seats, positions), caches, tap_layers=tap_layers)
        assert output.taps is not None
        return output.taps.view(num_sequences, num_positions, -1)
