"""The parts Gemma targets and drafters are made of, as thin wrappers that hold weights and call kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.heads import HeadNorms, HeadRows
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.ops import Kernels
from outrider.models.attention import KeysValues, RopeTable
from outrider.models.config import ExpertsSpec, LayerSpec, PerLayerSpec
from outrider.weights.loader import TensorClaims
from outrider.weights.low_bit import ExpertStack
from outrider.weights.packed import PackedWeight


class WeightReader:
    """Takes tensors from a checkpoint by name and shape, once each, in the form the kernels want."""

    def __init__(
        self,
        claims: TensorClaims,
        kernels: Kernels,
        *,
        norm_offset: float,
        dtype: torch.dtype,
        device: torch.device,
        quantize: Callable[[PackedWeight], PackedWeight] | None = None,
    ) -> None:
        """`quantize` is applied to the matrices of `linear`, `linears` and `pack` before they are packed."""
        self.claims, self.kernels, self.quantize = claims, kernels, quantize
        self.norm_offset, self.dtype, self.device = norm_offset, dtype, device

    def without_quantization(self) -> WeightReader:
        """The same, for matrices that stay as they are stored."""
        return WeightReader(
            self.claims, self.kernels, norm_offset=self.norm_offset, dtype=self.dtype, device=self.device
        )

    def linear(self, name: str, out_features: int, in_features: int) -> Any:
        """A packed matrix [out, in] for `Kernels.linear`."""
        return self.pack(self.claims.take(name, (out_features, in_features)))

    def linears(self, names: Sequence[str], out_features: Sequence[int], in_features: int) -> list[Any]:
        """Packed matrices [out_i, in] that are multiplied with the same inputs."""
        shapes = [(each, in_features) for each in out_features]
        stored = [self.claims.take(*claim) for claim in zip(names, shapes, strict=True)]
        return self.kernels.pack_together(stored if self.quantize is None else list(map(self.quantize, stored)))

    def pack(self, stored: PackedWeight) -> Any:
        """A matrix [out, in] that was taken, for `Kernels.linear`."""
        return self.kernels.pack(stored if self.quantize is None else self.quantize(stored))

    def norm(self, name: str, size: int) -> Tensor:
        """A norm weight [size], offset included, in at least float32."""
        return self.vector(name, size) + self.norm_offset

    def vector(self, name: str, size: int) -> Tensor:
        """Stored factors [size], in at least float32."""
        return self.plain(name, (size,))

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Numbers that no kernel needs packed, in at least float32."""
        return self.claims.take(name, shape).dequantize(self._precise, self.device)

    def unit_norm(self, size: int) -> Tensor:
        """The factors [size] of a norm that stores no weight."""
        return torch.ones(size, dtype=self._precise, device=self.device)

    @property
    def _precise(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def scalar(self, name: str) -> float:
        """A stored factor of shape [1]; 1 on the meta device, where nothing has a value."""
        stored = self.claims.take(name, (1,))
        return 1.0 if self.device.type == "meta" else float(stored.dequantize(torch.float64))


@dataclass(frozen=True)
class AttentionWeights:
    """Projections and head norms of one attention layer, bias-free."""

    q_proj: Any
    k_proj: Any | None  # None, like k_norm, where the layer reads another's keys and values
    v_proj: Any | None  # None there, and where values are the key projection
    o_proj: Any
    q_norm: Tensor
    k_norm: Tensor | None
    v_norm: Tensor | None  # ones, where values are normed

    @staticmethod
    def read(
        reader: WeightReader,
        prefix: str,
        spec: LayerSpec,
        *,
        hidden_size: int,
        num_heads: int,
        norms_values: bool = False,
    ) -> AttentionWeights:
        """Claim those of `<prefix>.{q,k,v,o}_proj` and `{q,k}_norm` that the layer has."""
        q_size, kv_size = num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        has_keys = spec.cache_source is None
        has_values = has_keys and not spec.values_are_keys
        names = ["q_proj", *(["k_proj"] if has_keys else []), *(["v_proj"] if has_values else [])]
        sizes = [q_size, kv_size, kv_size][: len(names)]
        projections = reader.linears([f"{prefix}.{name}.weight" for name in names], sizes, hidden_size)
        q_proj, k_proj, v_proj = [*projections, None, None][:3]
        return AttentionWeights(
            q_proj=q_proj,
            k_proj=k_proj,
            v_proj=v_proj,
            o_proj=reader.linear(f"{prefix}.o_proj.weight", hidden_size, q_size),
            q_norm=reader.norm(f"{prefix}.q_norm.weight", spec.head_dim),
            k_norm=reader.norm(f"{prefix}.k_norm.weight", spec.head_dim) if has_keys else None,
            v_norm=reader.unit_norm(spec.head_dim) if norms_values else None,
        )

    def queries(
        self,
        hidden: Tensor,
        rope: RopeTable,
        seats: Tensor,
        positions: Tensor,
        cache: LayerCache,
        *,
        kernels: Kernels,
        eps: float,
    ) -> Tensor:
        """hidden [R, N] -> normed, rotated queries [R, H, D]; keys and values, if it has any, to the cache."""
        projected = kernels.linears(hidden, (self.q_proj, *self._kv_proj))
        rows = HeadRows(projected[0], *self._keys_values_of(projected[1:]))
        queries, _, _ = kernels.finish_heads(
            rows, self._norms, rope.cos, rope.sin, positions, eps=eps, cache=cache, seats=seats
        )
        assert queries is not None
        return queries

    def queries_keys_values(
        self, hidden: Tensor, rope: RopeTable, positions: Tensor, *, kernels: Kernels, eps: float
    ) -> tuple[Tensor, KeysValues]:
        """hidden [R, N] -> normed, rotated queries [R, H, D] and keys, and values, each [R, G, D]."""
        projected = kernels.linears(hidden, (self.q_proj, *self._kv_proj))
        rows = HeadRows(projected[0], *self._keys_values_of(projected[1:]))
        queries, keys, values = kernels.finish_heads(rows, self._norms, rope.cos, rope.sin, positions, eps=eps)
        assert queries is not None, "queries were projected"
        assert keys is not None, "this layer reads another's keys and values"
        assert values is not None
        return queries, KeysValues(keys, values)

    def write_keys_values(
        self,
        hidden: Tensor,
        rope: RopeTable,
        seats: Tensor,
        positions: Tensor,
        cache: LayerCache,
        *,
        kernels: Kernels,
        eps: float,
    ) -> None:
        """Normed, rotated keys, and values, of hidden [R, N] to the cache."""
        rows = HeadRows(None, *self._keys_values_of(kernels.linears(hidden, self._kv_proj)))
        kernels.finish_heads(rows, self._norms, rope.cos, rope.sin, positions, eps=eps, cache=cache, seats=seats)

    @property
    def _kv_proj(self) -> tuple[Any, ...]:
        return tuple(weight for weight in (self.k_proj, self.v_proj) if weight is not None)

    @property
    def _norms(self) -> HeadNorms:
        return HeadNorms(self.q_norm, self.k_norm, self.v_norm)

    @staticmethod
    def _keys_values_of(projected: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What `_kv_proj` gave as keys and values: two, one that is both, or neither."""
        return (projected[0], projected[-1]) if projected else (None, None)

    def output(self, attended: Tensor, *, kernels: Kernels, residual: Tensor | None = None) -> Tensor:
        """Attention result [R, H, D] (+ residual) -> [R, N]."""
        return kernels.linear(attended.view(len(attended), -1), self.o_proj, residual=residual)


@dataclass(frozen=True)
class MlpWeights:
    """down(activation(gate x) * up x)."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    @staticmethod
    def read(reader: WeightReader, prefix: str, *, hidden_size: int, intermediate_size: int) -> MlpWeights:
        """Claim `<prefix>.{gate,up,down}_proj`."""
        names = [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
        gate_proj, up_proj = reader.linears(names, [intermediate_size] * 2, hidden_size)
        return MlpWeights(
            gate_proj=gate_proj,
            up_proj=up_proj,
            down_proj=reader.linear(f"{prefix}.down_proj.weight", hidden_size, intermediate_size),
        )

    def forward(self, hidden: Tensor, *, kernels: Kernels, activation: str, residual: Tensor | None = None) -> Tensor:
        """hidden [R, N] (+ residual) -> [R, N]."""
        gated = kernels.gated_linear(hidden, self.gate_proj, self.up_proj, activation=activation)
        return kernels.linear(gated, self.down_proj, residual=residual)


@dataclass(frozen=True)
class ExpertsWeights:
    """Router and experts that work beside the dense MLP of a layer (formats.md §1.1, MoE)."""

    num_chosen: int
    router_norm: Tensor  # router.scale / sqrt(N)
    router_proj: Any
    expert_scales: Tensor  # [E]
    weights: Any
    input_norm: Tensor
    dense_norm: Tensor  # over the dense MLP's output
    output_norm: Tensor  # over the experts' sum

    @staticmethod
    def read(reader: WeightReader, prefix: str, spec: ExpertsSpec, *, hidden_size: int) -> ExpertsWeights:
        """Claim `<prefix>.router.*`, `<prefix>.experts.*` and the three norms around them."""
        size, inner, num = hidden_size, spec.intermediate_size, spec.num_experts
        gate_up = _expert_matrices(reader.claims, prefix, ("gate_proj", "up_proj"), "gate_up_proj", (num, inner, size))
        down = _expert_matrices(reader.claims, prefix, ("down_proj",), "down_proj", (num, size, inner))
        return ExpertsWeights(
            num_chosen=spec.num_chosen,
            router_norm=reader.vector(f"{prefix}.router.scale", size) * size**-0.5,
            router_proj=reader.linear(f"{prefix}.router.proj.weight", num, size),
            expert_scales=reader.vector(f"{prefix}.router.per_expert_scale", num),
            weights=reader.kernels.pack_experts(gate_up, down),
            input_norm=reader.norm(f"{prefix}.pre_feedforward_layernorm_2.weight", size),
            dense_norm=reader.norm(f"{prefix}.post_feedforward_layernorm_1.weight", size),
            output_norm=reader.norm(f"{prefix}.post_feedforward_layernorm_2.weight", size),
        )

    def forward(self, hidden: Tensor, dense: Tensor, *, kernels: Kernels, activation: str, eps: float) -> Tensor:
        """The layer's un-normed hidden [R, N] and its dense MLP's output [R, N] -> both branches, normed and added."""
        chosen, shares = self.route(hidden, kernels=kernels, eps=eps)
        normed = kernels.rms_norm(hidden, self.input_norm, eps=eps)
        summed = kernels.experts(normed, self.weights, chosen, shares, activation=activation)
        return kernels.rms_norm_add(
            summed, self.output_norm, kernels.rms_norm(dense, self.dense_norm, eps=eps), eps=eps
        )

    def route(self, hidden: Tensor, *, kernels: Kernels, eps: float) -> tuple[Tensor, Tensor]:
        """hidden [R, N] -> the experts of each row, int64 [R, K], and their shares [R, K].

        A softmax over the chosen scores is the softmax over all of them, renormalised.
        """
        scores = kernels.logits(kernels.rms_norm(hidden, self.router_norm, eps=eps), self.router_proj)
        best = scores.topk(self.num_chosen, dim=-1)
        return best.indices, best.values.softmax(dim=-1) * self.expert_scales[best.indices]


def _expert_matrices(
    claims: TensorClaims, prefix: str, names: tuple[str, ...], fused: str, shape: tuple[int, int, int]
) -> PackedWeight:
    """The experts' matrices [E, out, in] of each of `names`, one after the other along `out`.

    Stored in one tensor `experts.<fused>`; or, as ModelOpt exports them, each as `experts.<e>.<name>.weight`.
    """
    num_experts, out_features, in_features = shape
    if f"{prefix}.experts.0.{names[0]}.weight" not in claims:
        return claims.take(f"{prefix}.experts.{fused}", (num_experts, len(names) * out_features, in_features))
    experts = [
        [claims.take(f"{prefix}.experts.{expert}.{name}.weight", (out_features, in_features)) for name in names]
        for expert in range(num_experts)
    ]
    return ExpertStack(f"{prefix}.experts.{fused}", experts)


@dataclass(frozen=True)
class PerLayerEmbedding:
    """The second embedding table and what mixes it with the first (formats.md §1.1, per-layer embeddings)."""

    size: int
    table: Any  # [V, L * P]
    table_scale: float
    projection: Any  # [L * P, N]
    norm: Tensor

    @staticmethod
    def read(
        reader: WeightReader, prefix: str, spec: PerLayerSpec, *, hidden_size: int, num_layers: int
    ) -> PerLayerEmbedding:
        """Claim `<prefix>.embed_tokens_per_layer` and `<prefix>.per_layer_*`."""
        width = num_layers * spec.size
        return PerLayerEmbedding(
            size=spec.size,
            table=reader.linear(f"{prefix}.embed_tokens_per_layer.weight", spec.vocab_size, width),
            table_scale=torch.tensor(spec.size**0.5, dtype=reader.dtype).item(),
            projection=reader.linear(f"{prefix}.per_layer_model_projection.weight", width, hidden_size),
            norm=reader.norm(f"{prefix}.per_layer_projection_norm.weight", spec.size),
        )

    def forward(self, token_ids: Tensor, embedded: Tensor, *, kernels: Kernels, eps: float) -> Tensor:
        """Token ids int64 [R] and their scaled embeddings [R, N] -> the layers' inputs, [L, R, P]."""
        shape = (len(token_ids), -1, self.size)
        looked_up = kernels.embed(token_ids, self.table, scale=self.table_scale).view(shape)
        projected = (kernels.linear(embedded, self.projection) * embedded.shape[1] ** -0.5).view(shape)
        mixed = (kernels.rms_norm(projected, self.norm, eps=eps) + looked_up) * 2**-0.5
        return mixed.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class PerLayerWeights:
    """What one layer does with its own input: residual + norm(projection(activation(gate x) * input)).

    `forward` stops before the norm, which the layer fuses with what follows.
    """

    gate: Any
    projection: Any
    norm: Tensor

    @staticmethod
    def read(reader: WeightReader, prefix: str, spec: PerLayerSpec, *, hidden_size: int) -> PerLayerWeights:
        """Claim `<prefix>.per_layer_input_gate`, `per_layer_projection` and `post_per_layer_input_norm`."""
        return PerLayerWeights(
            gate=reader.linear(f"{prefix}.per_layer_input_gate.weight", spec.size, hidden_size),
            projection=reader.linear(f"{prefix}.per_layer_projection.weight", hidden_size, spec.size),
            norm=reader.norm(f"{prefix}.post_per_layer_input_norm.weight", hidden_size),
        )

    def forward(self, hidden: Tensor, own_input: Tensor, *, kernels: Kernels, activation: str) -> Tensor:
        """hidden [R, N] and the layer's input [R, P] -> projection(activation(gate x) * input), [R, N]."""
        gated = kernels.gated(kernels.linear(hidden, self.gate), own_input, activation=activation)
        return kernels.linear(gated, self.projection)
