"""A block drafter: it fills a block of mask slots in one pass, reading target features (DFlash, arXiv 2602.06036).

Every draft layer attends to the same projected target features at their true positions and to the block's own slots
(formats.md §2.1). What differs between DFlash, DSpark and the hybrid of the two is declared in `DrafterConfig`: which
token a slot predicts, how layers are built, what is scaled, and the heads on top (`dspark.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import WeightsError
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.ops import Kernels
from outrider.kernels.reference import soft_cap
from outrider.models.attention import LayerCaches, RopeTable, rope_table
from outrider.models.draft_layers import BlockRows, DraftLayer, read_layer
from outrider.models.drafter_config import DrafterConfig
from outrider.models.dspark import BlockWalk, ConfidenceHead, MarkovHead
from outrider.models.gemma import GemmaTarget
from outrider.models.layers import WeightReader
from outrider.weights.load_quantization import LoadQuantization
from outrider.weights.loader import TensorClaims
from outrider.weights.packed import BlockInt8Weight, DenseWeight, PackedWeight


class DFlashDrafter:
    """Weights of a drafter. Embedding and head are the target's own unless the file brings others."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, PackedWeight],
        target: GemmaTarget,
        *,
        kernels: Kernels,
        context_length: int,
        source: Path,
        quantization: str | None = None,
    ) -> None:
        """`quantization` is one of weights.load_quantization.QUANTIZATIONS, for projections and head."""
        claims = TensorClaims(tensors, source=source)
        quantize = None
        if quantization is not None:
            quantize = LoadQuantization(quantization, kernels.reads_low_bit, target.device)
        reader = WeightReader(
            claims, kernels, norm_offset=0.0, dtype=target.dtype, device=target.device, quantize=quantize
        )
        size, num_taps = config.hidden_size, len(config.target_layer_ids)
        self.config, self.kernels, self.target = config, kernels, target
        self.fc = reader.linear("fc.weight", size, num_taps * size)
        self.hidden_norm = reader.norm("hidden_norm.weight", size)
        self.final_norm = reader.norm("norm.weight", size)
        self.layers = [read_layer(reader, index, config) for index in range(len(config.layers))]
        self.draft_to_target = read_vocabulary(claims, config, source, target.device)
        self.embedding = _read_embedding(claims, config, target, kernels)
        self.head = _read_head(reader, config, target, self.draft_to_target)
        self.markov = MarkovHead.read(reader.without_quantization(), config, self.draft_to_target)
        self.confidence = ConfidenceHead.read(reader, config)
        self.skipped_tensors = claims.finish(skip=config.skipped_tensors)
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

    def context_features(self, taps: Tensor) -> Tensor:
        """Target taps [T, taps * N] -> the features every draft layer reads, [T, N]."""
        return self.kernels.rms_norm(self.kernels.linear(taps, self.fc), self.hidden_norm, eps=self.config.rms_norm_eps)

    def write_context(self, taps: Tensor, seats: Tensor, positions: Tensor, caches: LayerCaches) -> None:
        """Append context keys and values for committed rows: taps [T, taps * N], int64 [T] seats and positions."""

        def write(taps: Tensor, seats: Tensor, positions: Tensor) -> list[Tensor]:
            features = self.context_features(taps)
            for layer, cache in zip(self.layers, caches, strict=True):
                layer.attention.write_keys_values(
                    features,
                    self._rope(layer),
                    seats,
                    positions,
                    cache,
                    kernels=self.kernels,
                    eps=self.config.rms_norm_eps,
                )
            return []

        self.kernels.run(write, (taps, seats, positions), recordings=caches.recordings, key="context")

    def _rope(self, layer: DraftLayer) -> RopeTable:
        return self.ropes[layer.spec.rope, layer.spec.head_dim]

    def block(
        self,
        anchor_token_ids: Tensor,
        seats: Tensor,
        starts: Tensor,
        *,
        num_drafts: int,
        draft_lengths: Tensor | None = None,
    ) -> BlockRows:
        """The rows that draft so many tokens after anchors int64 [Q] at positions `starts` int64 [Q].

        Requests that want fewer than num_drafts say so in `draft_lengths` int64 [Q].
        """
        num_slots = self.config.layout.num_slots(num_drafts)
        token_ids = torch.full((len(seats), num_slots), self.config.mask_token_id, device=seats.device)
        token_ids[:, 0] = anchor_token_ids
        widths = None if draft_lengths is None else draft_lengths + self.config.layout.num_silent_slots
        return BlockRows(token_ids.view(-1), seats, starts, num_slots, widths)

    def hidden(self, block: BlockRows, caches: LayerCaches) -> Tensor:
        """Run the block; return normed hidden states [Q, K, N] of the slots that draft. Caches are only read."""
        kernels, config = self.kernels, self.config
        sights = list({layer.sight: None for layer in self.layers})

        def run_layers(hidden: Tensor, positions: Tensor, *spans: Tensor) -> list[Tensor]:
            for layer, cache in zip(self.layers, caches, strict=True):
                hidden = self._layer_forward(layer, cache, hidden, positions, spans[sights.index(layer.sight)])
            return [kernels.rms_norm(hidden, self.final_norm, eps=config.rms_norm_eps)]

        embeds = kernels.embed(block.token_ids, self.embedding, scale=self._embedding_scale)
        inputs = (embeds, block.positions, *(sight.spans(block) for sight in sights))
        (normed,) = kernels.run(run_layers, inputs, recordings=caches.recordings, key="block")
        return normed.view(-1, block.block_rows, config.hidden_size)[:, config.layout.num_silent_slots :]

    @property
    def _embedding_scale(self) -> float:
        declared = self.config.embedding_scale
        return self.target.embedding_scale if declared is None else declared

    def _layer_forward(
        self, layer: DraftLayer, cache: LayerCache, hidden: Tensor, positions: Tensor, spans: Tensor
    ) -> Tensor:
        kernels, config = self.kernels, self.config
        normed = kernels.rms_norm(hidden, layer.input_norm, eps=config.rms_norm_eps)
        queries, fresh = layer.attention.queries_keys_values(
            normed, self._rope(layer), positions, kernels=kernels, eps=config.rms_norm_eps
        )
        attended = kernels.attention(
            queries,
            cache,
            spans,
            scale=config.attention_scale,
            fresh_k=fresh.keys,
            fresh_v=fresh.values,
        )
        return layer.after_attention(
            attended, hidden, kernels=kernels, activation=config.activation, eps=config.rms_norm_eps
        )

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [Q, K, N] -> logits [Q, K, Vd] in at least float32, soft-capped, before any Markov head."""
        rows, factor, cap = hidden.reshape(-1, hidden.shape[-1]), self.config.output_multiplier, self._cap
        logits = self.kernels.logits(rows, self.head, cap=cap) if factor == 1.0 else self._multiplied(rows, factor)
        return logits.view(*hidden.shape[:2], -1)

    def _multiplied(self, rows: Tensor, factor: float) -> Tensor:
        """Logits of a drafter whose head is scaled; the cap comes after that."""
        return soft_cap(self.kernels.logits(rows, self.head) * factor, self._cap)

    @property
    def _cap(self) -> float | None:
        return self.config.final_logit_softcapping

    def walk(self, block: BlockRows, caches: LayerCaches, *, num_candidates: int) -> BlockWalk:
        """Run the block and get ready to draft from left to right."""
        hidden = self.hidden(block, caches)
        return BlockWalk(
            hidden,
            self.base_logits(hidden),
            num_candidates=num_candidates,
            draft_to_target=self.draft_to_target,
            markov=self.markov,
            confidence=self.confidence,
        )

    def draft_logits(
        self, block: BlockRows, caches: LayerCaches, previous_token_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [Q, K, Vd] and chances [Q, K] of all slots, where int64 [Q, K] stood before them: a walk's plain twin.

        previous_token_ids are target ids, the anchor first.
        """
        hidden = self.hidden(block, caches)
        logits, chances, state = self.base_logits(hidden), [], None
        for slot, token_ids in enumerate(previous_token_ids.unbind(dim=1)):
            embedded = None
            if self.markov is not None:
                embedded = self.markov.embed(token_ids)
                latent, state = self.markov.step(embedded, hidden[:, slot], state)
                logits[:, slot] += self.markov.bias(latent)
            if self.confidence is not None:
                chances.append(self.confidence.forward(hidden[:, slot], embedded))
        return logits, torch.stack(chances, dim=1) if chances else None

    @property
    def has_heads(self) -> bool:
        """True where a slot needs to know the token drafted before it."""
        return self.markov is not None or self.confidence is not None

    def best(self, block: BlockRows, caches: LayerCaches) -> Tensor:
        """Run the block; return the likeliest draft ids, int64 [Q, K], of a drafter without heads; stores no logits."""
        hidden = self.hidden(block, caches)
        if self.config.output_multiplier != 1.0:
            return self.base_logits(hidden).argmax(dim=-1)
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self.kernels.best(rows, self.head, cap=self._cap)[1].view(hidden.shape[:2])


def read_vocabulary(claims: TensorClaims, config: DrafterConfig, source: Path, device: torch.device) -> Tensor | None:
    """Target id of each draft id, int64 [Vd]; files store it as the difference `d2t` (formats.md §2.5)."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    offsets = claims.take_table("d2t", (config.draft_vocab_size,), torch.int64, torch.int32)
    flags = claims.take_table("t2d", (config.vocab_size,), torch.bool) if "t2d" in claims else None
    if device.type == "meta":
        return torch.arange(config.draft_vocab_size)  # any ids, and on the CPU: nothing has a value there
    ids = offsets.to("cpu", torch.int64) + torch.arange(config.draft_vocab_size)
    if bool((ids < 0).any()) or bool((ids >= config.vocab_size).any()) or len(set(ids.tolist())) != len(ids):
        raise WeightsError(
            f"tensor d2t of {source} does not map to {len(ids)} different ids below {config.vocab_size}. It holds the "
            "target id of each draft id, less the draft id."
        )
    if flags is not None and not torch.equal(flags.cpu().nonzero().squeeze(1), ids.sort().values):
        raise WeightsError(f"tensors d2t and t2d of {source} name different tokens. Download the drafter again.")
    return ids.to(device)


def _read_embedding(claims: TensorClaims, config: DrafterConfig, target: GemmaTarget, kernels: Kernels) -> Any:
    """The table that block tokens are embedded with."""
    if "embed_tokens.weight" not in claims:
        return target.embedding
    weight = claims.take("embed_tokens.weight", (config.vocab_size, config.hidden_size))
    return target.embedding if _are_equal(weight, target.stored_embedding) else kernels.pack(weight)


def _read_head(reader: WeightReader, config: DrafterConfig, target: GemmaTarget, draft_to_target: Tensor | None) -> Any:
    """The matrix that gives draft logits, [Vd, N]."""
    if "lm_head.weight" in reader.claims:
        own = reader.claims.take("lm_head.weight", (config.draft_vocab_size, config.hidden_size))
        return _targets_head(reader, target) if _are_equal(own, target.stored_embedding) else reader.pack(own)
    if draft_to_target is None:
        return _targets_head(reader, target)
    return reader.pack(select_rows(target.stored_embedding, draft_to_target.cpu()))


def _targets_head(reader: WeightReader, target: GemmaTarget) -> Any:
    """The target's own table, or a quantised copy where drafting reads fewer bytes of it: memory for time."""
    if reader.quantize is None or not reader.kernels.reads_low_bit or not isinstance(target.embedding, Tensor):
        return target.embedding
    return reader.pack(DenseWeight("lm_head.weight", target.embedding))


def _are_equal(weight: PackedWeight, other: PackedWeight) -> bool:
    """True for a copy of the target's table, as DSpark files bring it: one in memory will do."""
    if type(weight) is not DenseWeight or type(other) is not DenseWeight or weight.values.is_meta:
        return False
    return weight.values.dtype == other.values.dtype and torch.equal(weight.values, other.values)


def select_rows(weight: PackedWeight, ids: Tensor) -> PackedWeight:
    """The rows `ids` (int64 [n]) of a stored matrix, in the same format."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.name, weight.values[ids])
    offsets = None if weight.offsets is None else weight.offsets[ids]
    return BlockInt8Weight(weight.name, weight.values[ids], weight.scales[ids], offsets, weight.group_size)
