"""DFlash: a drafter that fills a block of mask slots in one pass, reading target features (arXiv 2602.06036).

Slot 0 holds the anchor and predicts nothing; slot k predicts the token at anchor + k. Every draft layer attends to the
same projected target features at their true positions and to the block's own slots (formats.md §2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import WeightsError
from outrider.kernels.ops import Kernels
from outrider.models.attention import LayerCache, LayerCaches, rope_table
from outrider.models.config import DrafterConfig, LayerSpec
from outrider.models.gemma import GemmaTarget
from outrider.models.layers import AttentionWeights, MlpWeights, WeightReader, soft_cap
from outrider.weights.loader import TensorClaims
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight


@dataclass(frozen=True)
class DFlashLayer:
    """One pre-norm draft layer."""

    spec: LayerSpec
    is_causal: bool
    attention: AttentionWeights
    mlp: MlpWeights
    input_norm: Tensor
    post_attention_norm: Tensor

    @property
    def sight(self) -> tuple[int | None, bool]:
        """What decides which keys a row sees; layers that share it share spans."""
        return self.spec.window, self.is_causal


@dataclass(frozen=True)
class BlockRows:
    """The rows of a draft pass: `block_rows` slots for each of `len(seats)` requests, request after request."""

    token_ids: Tensor  # int64 [requests * block_rows]: anchor, then mask
    seats: Tensor  # int64 [requests]
    starts: Tensor  # int64 [requests]: the anchor's position
    block_rows: int

    @property
    def positions(self) -> Tensor:
        """Absolute position of each row, int64 [requests * block_rows]."""
        offsets = torch.arange(self.block_rows, device=self.starts.device)
        return (self.starts[:, None] + offsets).view(-1)


class DFlashDrafter:
    """Weights of a DFlash drafter; embedding and head are the target's own (a reduced head takes rows of it)."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, PackedWeight],
        target: GemmaTarget,
        *,
        kernels: Kernels,
        context_length: int,
        source: Path,
    ) -> None:
        claims = TensorClaims(tensors, source=source)
        reader = WeightReader(claims, kernels, norm_offset=0.0, dtype=target.dtype, device=target.device)
        size, num_taps = config.hidden_size, len(config.target_layer_ids)
        self.config, self.kernels, self.target = config, kernels, target
        self.fc = reader.linear("fc.weight", size, num_taps * size)
        self.hidden_norm = reader.norm("hidden_norm.weight", size)
        self.final_norm = reader.norm("norm.weight", size)
        self.layers = [self._read_layer(reader, i) for i in range(len(config.layers))]
        ids = self._read_vocabulary(claims, source, target.device)
        claims.finish()
        self.draft_to_target = None if ids is None else ids.to(target.device)
        self.head = target.embedding if ids is None else kernels.pack(select_rows(target.stored_embedding, ids))
        self.ropes = {
            (spec.rope, spec.head_dim): rope_table(
                spec.rope,
                head_dim=spec.head_dim,
                num_positions=context_length + config.block_size,
                dtype=target.dtype,
                device=target.device,
            )
            for spec in config.layers
        }

    def _read_layer(self, reader: WeightReader, index: int) -> DFlashLayer:
        config, spec, prefix = self.config, self.config.layers[index], f"layers.{index}"
        size = config.hidden_size
        return DFlashLayer(
            spec=spec,
            is_causal=config.layer_is_causal[index],
            attention=AttentionWeights.read(
                reader, f"{prefix}.self_attn", spec, hidden_size=size, num_heads=config.num_heads
            ),
            mlp=MlpWeights.read(reader, f"{prefix}.mlp", hidden_size=size, intermediate_size=config.intermediate_size),
            input_norm=reader.norm(f"{prefix}.input_layernorm.weight", size),
            post_attention_norm=reader.norm(f"{prefix}.post_attention_layernorm.weight", size),
        )

    def _read_vocabulary(self, claims: TensorClaims, source: Path, device: torch.device) -> Tensor | None:
        """Target id of each draft id, int64 [Vd] on the CPU; files store the difference `d2t` (formats.md §2.5)."""
        config = self.config
        if config.draft_vocab_size == config.vocab_size:
            return None
        stored = claims.take("d2t", (config.draft_vocab_size,))
        if device.type == "meta":
            return torch.arange(config.draft_vocab_size)  # any ids: nothing has a value there
        offsets = stored.dequantize(torch.float64).to(torch.int64)
        ids = offsets + torch.arange(config.draft_vocab_size)
        if bool((ids < 0).any()) or bool((ids >= config.vocab_size).any()) or len(set(ids.tolist())) != len(ids):
            raise WeightsError(
                f"tensor d2t of {source} does not map to {len(ids)} different ids below {config.vocab_size}."
            )
        return ids

    def context_features(self, taps: Tensor) -> Tensor:
        """Target taps [T, taps * N] -> the features every draft layer reads, [T, N]."""
        return self.kernels.rms_norm(self.kernels.linear(taps, self.fc), self.hidden_norm, eps=self.config.rms_norm_eps)

    def write_context(self, taps: Tensor, seats: Tensor, positions: Tensor, caches: LayerCaches) -> None:
        """Append context keys and values for committed rows: taps [T, taps * N], int64 [T] seats and positions."""

        def write(taps: Tensor, seats: Tensor, positions: Tensor) -> list[Tensor]:
            features = self.context_features(taps)
            for layer, cache in zip(self.layers, caches, strict=True):
                keys, values = layer.attention.keys_values(
                    features, self._rope(layer), positions, kernels=self.kernels, eps=self.config.rms_norm_eps
                )
                self.kernels.write_cache(cache.keys, cache.values, keys, values, seats, positions)
            return []

        self.kernels.run(write, (taps, seats, positions), recordings=caches.recordings, key="context")

    def _rope(self, layer: DFlashLayer) -> Any:
        return self.ropes[layer.spec.rope, layer.spec.head_dim]

    def forward(self, block: BlockRows, caches: LayerCaches) -> Tensor:
        """Run the block; return logits [requests, block_rows - 1, Vd] in at least float32. Caches are only read."""
        logits = self.kernels.logits(self._drafted(block, caches), self.head)
        return soft_cap(logits, self.config.final_logit_softcapping).view(
            -1, block.block_rows - 1, self.config.draft_vocab_size
        )

    def best(self, block: BlockRows, caches: LayerCaches) -> Tensor:
        """Run the block; return the likeliest draft ids, int64 [requests, block_rows - 1], without storing logits."""
        if self.config.final_logit_softcapping is not None:  # the cap rounds, so that different logits can tie
            return self.forward(block, caches).argmax(dim=-1)
        return self.kernels.best(self._drafted(block, caches), self.head)[1].view(-1, block.block_rows - 1)

    def _drafted(self, block: BlockRows, caches: LayerCaches) -> Tensor:
        """Normed hidden states of the slots that draft, [requests * (block_rows - 1), N]."""
        kernels, config = self.kernels, self.config
        scale = self.target.embedding_scale if config.scale_block_embeddings else 1.0
        by_sight = {layer.sight: layer for layer in self.layers}
        sights = list(by_sight)

        def run_layers(hidden: Tensor, positions: Tensor, *spans: Tensor) -> list[Tensor]:
            for layer, cache in zip(self.layers, caches, strict=True):
                hidden = self._layer_forward(layer, cache, hidden, positions, spans[sights.index(layer.sight)])
            return [kernels.rms_norm(hidden, self.final_norm, eps=config.rms_norm_eps)]

        embeds = kernels.embed(block.token_ids, self.target.embedding) * scale
        inputs = (embeds, block.positions, *(block_spans(block, layer) for layer in by_sight.values()))
        (normed,) = kernels.run(run_layers, inputs, recordings=caches.recordings, key="block")
        return normed.view(-1, block.block_rows, config.hidden_size)[:, 1:].reshape(-1, config.hidden_size)

    def _layer_forward(
        self, layer: DFlashLayer, cache: LayerCache, hidden: Tensor, positions: Tensor, spans: Tensor
    ) -> Tensor:
        kernels, eps, attention = self.kernels, self.config.rms_norm_eps, layer.attention
        normed = kernels.rms_norm(hidden, layer.input_norm, eps=eps)
        queries, fresh = attention.queries_keys_values(normed, self._rope(layer), positions, kernels=kernels, eps=eps)
        attended = kernels.attention(
            queries,
            cache.keys,
            cache.values,
            spans,
            scale=layer.spec.head_dim**-0.5,
            fresh_k=fresh.keys,
            fresh_v=fresh.values,
        )
        hidden = attention.output(attended, kernels=kernels, residual=hidden)
        normed = kernels.rms_norm(hidden, layer.post_attention_norm, eps=eps)
        return layer.mlp.forward(normed, kernels=kernels, activation=self.config.activation, residual=hidden)


def block_spans(block: BlockRows, layer: DFlashLayer) -> Tensor:
    """Spans (kernels.ops) of block rows, int32 [requests * block_rows, 5].

    A row sees context before the anchor and slots of its own block (earlier ones only where the layer is causal);
    a window counts positions back from the row, itself included, over context and block alike.
    """
    rows, window = block.block_rows, layer.spec.window
    device = block.starts.device
    slots = torch.arange(rows, device=device).expand(len(block.starts), rows)
    starts = block.starts[:, None].expand_as(slots)
    first_row = torch.arange(len(block.starts), device=device)[:, None] * rows
    oldest = torch.zeros_like(starts) if window is None else (starts + slots - window + 1).clamp_min(0)
    context_start = torch.minimum(oldest, starts)
    fresh_start = first_row + (oldest - starts).clamp_min(0)
    fresh_end = first_row + (slots + 1 if layer.is_causal else torch.full_like(slots, rows))
    seats = block.seats[:, None].expand_as(slots)
    columns = [seats, context_start, starts, fresh_start, fresh_end]
    return torch.stack(columns, dim=-1).view(-1, 5).to(torch.int32)


def select_rows(weight: PackedWeight, ids: Tensor) -> PackedWeight:
    """The rows `ids` (int64 [n]) of a stored matrix, in the same format."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.name, weight.values[ids])
    offsets = None if weight.offsets is None else weight.offsets[ids]
    return BlockInt8Weight(weight.name, weight.values[ids], weight.scales[ids], offsets, weight.group_size)
