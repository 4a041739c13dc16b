"""The Gemma text decoder as a target: packed rows in, hidden states and taps out.

Gemma 3 and Gemma 4. Generations differ in the fields of `TargetConfig` and `LayerSpec`; the code below is one decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.ops import Kernels
from outrider.models.attention import LayerCaches, Rows, causal_spans, rope_table
from outrider.models.config import LayerSpec, TargetConfig
from outrider.models.layers import (
    AttentionWeights,
    ExpertsWeights,
    MlpWeights,
    PerLayerEmbedding,
    PerLayerWeights,
    WeightReader,
)
from outrider.weights.loader import Checkpoint, TensorClaims
from outrider.weights.packed import DenseWeight, PackedWeight


@dataclass(frozen=True)
class GemmaLayer:
    """One decoder layer with its four sandwich norms."""

    spec: LayerSpec
    attention: AttentionWeights
    mlp: MlpWeights
    experts: ExpertsWeights | None
    per_layer: PerLayerWeights | None
    input_norm: Tensor
    post_attention_norm: Tensor
    pre_feedforward_norm: Tensor
    post_feedforward_norm: Tensor
    scalar: float  # multiplies the layer's output

    @staticmethod
    def read(reader: WeightReader, prefix: str, spec: LayerSpec, config: TargetConfig) -> GemmaLayer:
        """Claim every tensor under `<prefix>.`."""
        size = config.hidden_size
        return GemmaLayer(
            spec=spec,
            attention=AttentionWeights.read(
                reader,
                f"{prefix}.self_attn",
                spec,
                hidden_size=size,
                num_heads=config.num_heads,
                norms_values=config.norms_values,
            ),
            mlp=MlpWeights.read(
                reader,
                f"{prefix}.mlp",
                hidden_size=size,
                intermediate_size=config.intermediate_size * spec.mlp_multiple,
            ),
            experts=ExpertsWeights.read(reader, prefix, config.experts, hidden_size=size) if config.experts else None,
            per_layer=(
                PerLayerWeights.read(reader, prefix, config.per_layer, hidden_size=size) if config.per_layer else None
            ),
            input_norm=reader.norm(f"{prefix}.input_layernorm.weight", size),
            post_attention_norm=reader.norm(f"{prefix}.post_attention_layernorm.weight", size),
            pre_feedforward_norm=reader.norm(f"{prefix}.pre_feedforward_layernorm.weight", size),
            post_feedforward_norm=reader.norm(f"{prefix}.post_feedforward_layernorm.weight", size),
            scalar=reader.scalar(f"{prefix}.layer_scalar") if config.has_layer_scalars else 1.0,
        )


@dataclass(frozen=True)
class TargetOutput:
    """What a pass leaves: the last layer's output and the concatenated taps."""

    hidden: Tensor  # [R, N], before the final norm
    taps: Tensor | None  # [R, taps * N], outputs of the asked layers; None if none were asked


class GemmaTarget:
    """Weights of a Gemma decoder and its forward pass over packed rows."""

    def __init__(
        self,
        config: TargetConfig,
        checkpoint: Checkpoint,
        *,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        context_length: int,
    ) -> None:
        claims = TensorClaims(checkpoint.tensors, source=checkpoint.source)

        def unpacked(stored: PackedWeight) -> PackedWeight:
            """A wrong draft costs time, a wrong target text: low-bit products are the drafter's alone for now."""
            return DenseWeight(stored.name, stored.dequantize(dtype, device))

        reader = WeightReader(
            claims,
            kernels,
            norm_offset=config.norm_offset,
            dtype=dtype,
            device=device,
            quantize=unpacked if kernels.reads_low_bit else None,
        )
        self.config, self.kernels, self.dtype, self.device = config, kernels, dtype, device
        prefix = config.tensor_prefix
        self.stored_embedding = claims.take(f"{prefix}.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.embedding = kernels.pack(self.stored_embedding)
        self.embedding_scale = torch.tensor(
            config.embedding_scale, dtype=dtype
        ).item()  # rounded as the model was trained
        self.per_layer_embedding = (
            PerLayerEmbedding.read(
                reader, prefix, config.per_layer, hidden_size=config.hidden_size, num_layers=len(config.layers)
            )
            if config.per_layer
            else None
        )
        self.layers = [
            GemmaLayer.read(reader, f"{prefix}.layers.{i}", spec, config) for i, spec in enumerate(config.layers)
        ]
        self.final_norm = reader.norm(f"{prefix}.norm.weight", config.hidden_size)
        self.skipped_tensors = claims.finish(skip=(*config.skipped_tensors, *_unused_names(config)))
        self.ropes = {
            (spec.rope, spec.head_dim): rope_table(
                spec.rope, head_dim=spec.head_dim, num_positions=context_length, dtype=dtype, device=device
            )
            for spec in config.layers
        }

    def embed(self, token_ids: Tensor) -> Tensor:
        """Scaled input embeddings: int64 [R] -> [R, N]."""
        return self.kernels.embed(token_ids, self.embedding, scale=self.embedding_scale)

    def forward(
        self,
        rows: Rows,
        caches: LayerCaches,
        *,
        tap_layers: Sequence[int] = (),
        after_first_layers: Callable[[], None] | None = None,
    ) -> TargetOutput:
        """Run packed rows, write their keys and values, return hidden states and taps.

        Tap l is the output of decoder layer l (0-based), before any final norm (formats.md §2.1). `after_first_layers`
        is called once, about a quarter of the way.
        """
        windows = sorted({spec.window for spec in self.config.layers}, key=lambda window: window or 0)
        spans = [causal_spans(rows.seats, rows.positions, window) for window in windows]

        def run_layers(
            hidden: Tensor, own_inputs: Tensor, seats: Tensor, positions: Tensor, *spans: Tensor
        ) -> list[Tensor]:
            outputs: dict[int, Tensor] = {}
            normed = self.kernels.rms_norm(hidden, self.layers[0].input_norm, eps=self.config.rms_norm_eps)
            for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
                visible = spans[windows.index(layer.spec.window)]
                mixed = self._attend(layer, cache, normed, seats, positions, visible)
                hidden, normed = self._feed(index, mixed, hidden, own_inputs[index])
                if index in tap_layers:  # a prompt's rows of all layers would be memory for nothing
                    outputs[index] = hidden
                if index == len(self.layers) // 4 and after_first_layers is not None:
                    after_first_layers()
            return [hidden, *(outputs[i] for i in tap_layers)]

        embedded, own_inputs = self._inputs(rows)
        inputs = (embedded, own_inputs, rows.seats, rows.positions, *spans)
        key = ("target", tuple(tap_layers))
        if self.config.experts is None:
            hidden, *taps = self.kernels.run(run_layers, inputs, recordings=caches.recordings, key=key)
        else:  # the calls of a pass depend on which experts its rows choose: there is nothing to replay
            hidden, *taps = run_layers(*inputs)
        return TargetOutput(hidden, torch.cat(taps, dim=-1) if taps else None)

    def _inputs(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """What enters the first layer, [R, N], and what every layer gets beside it, [L, R, P].

        A given row is no token's: its per-layer embedding is that of the pad token (formats.md §1.1).
        """
        if rows.given is None:
            embedded = self.embed(rows.token_ids)
            return embedded, self._own_inputs(rows.token_ids, embedded)
        is_given, embeddings = rows.given.is_given, rows.given.embeddings
        token_ids = torch.where(is_given, self.config.pad_token_id, rows.token_ids)
        embedded = torch.where(is_given[:, None], embeddings, self.embed(token_ids))
        return embedded, self._own_inputs(token_ids, embedded)

    def _own_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """[L, R, P] for ids int64 [R] and what enters the first layer [R, N]; P is 0 without per-layer embeddings."""
        if self.per_layer_embedding is None:
            return embedded.new_empty(len(self.layers), len(token_ids), 0)
        return self.per_layer_embedding.forward(token_ids, embedded, kernels=self.kernels, eps=self.config.rms_norm_eps)

    def _attend(
        self, layer: GemmaLayer, cache: LayerCache, normed: Tensor, seats: Tensor, positions: Tensor, spans: Tensor
    ) -> Tensor:
        """A layer's normed input [R, N] -> what its attention gives, [R, N]."""
        kernels, attention = self.kernels, layer.attention
        rope = self.ropes[layer.spec.rope, layer.spec.head_dim]
        queries = attention.queries(
            normed, rope, seats, positions, cache, kernels=kernels, eps=self.config.rms_norm_eps
        )
        attended = kernels.attention(queries, cache, spans, scale=self.config.attention_scale)
        return attention.output(attended, kernels=kernels)

    def _feed(self, index: int, mixed: Tensor, hidden: Tensor, own_input: Tensor) -> tuple[Tensor, Tensor]:
        """What attention gave and the layer's input, [R, N] each -> its output and the next layer's normed input.

        Each norm goes with the sum before it: a row is read once for both. After the last layer there is no next.
        """
        kernels, eps, activation = self.kernels, self.config.rms_norm_eps, self.config.activation
        layer, after = self.layers[index], self.layers[index + 1 :]
        hidden, normed = kernels.rms_norm_add_norm(
            mixed, layer.post_attention_norm, hidden, layer.pre_feedforward_norm, eps=eps
        )
        fed = layer.mlp.forward(normed, kernels=kernels, activation=activation)
        if layer.experts is not None:
            fed = layer.experts.forward(hidden, fed, kernels=kernels, activation=activation, eps=eps)
        norm, scale = layer.post_feedforward_norm, layer.scalar
        if layer.per_layer is not None:
            hidden = kernels.rms_norm_add(fed, norm, hidden, eps=eps)
            fed = layer.per_layer.forward(hidden, own_input, kernels=kernels, activation=activation)
            norm = layer.per_layer.norm
        if not after:
            hidden = kernels.rms_norm_add(fed, norm, hidden, eps=eps, scale=scale)
            return hidden, hidden
        return kernels.rms_norm_add_norm(fed, norm, hidden, after[0].input_norm, eps=eps, scale=scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last layer's output [R, N] -> logits [R, V], at least float32, soft-capped where the model is."""
        normed = self.kernels.rms_norm(hidden, self.final_norm, eps=self.config.rms_norm_eps)
        return self.kernels.logits(normed, self.embedding, cap=self.config.final_logit_softcapping)

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Largest logit [R] and its token id int64 [R] of each row, without storing logits where that can be."""
        normed = self.kernels.rms_norm(hidden, self.final_norm, eps=self.config.rms_norm_eps)
        return self.kernels.best(normed, self.embedding, cap=self.config.final_logit_softcapping)


def _unused_names(config: TargetConfig) -> list[str]:
    """Keys and values that a checkpoint may still hold for layers that read another's (formats.md §1.1)."""
    readers = [index for index, spec in enumerate(config.layers) if spec.cache_source is not None]
    names = ("k_proj", "v_proj", "k_norm")
    return [f"{config.tensor_prefix}.layers.{index}.self_attn.{name}.weight" for index in readers for name in names]
