"""What a target is, read once from its config and declared: nothing below decides on a name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.weights.fields import Fields


class LayerKind(Enum):
    """Which earlier positions a layer sees: all of them, or the last `sliding_window`."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


# More than any model has: what a broken config asks for beyond them would only exhaust the memory.
MAX_LAYERS = 1024
DEFAULT_THETAS = {LayerKind.FULL: 1_000_000.0, LayerKind.SLIDING: 10_000.0}


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one layer kind: inv_freq_i = theta^(-2i/D) / factor, pairs (i, i + D/2)."""

    theta: float
    factor: float = 1.0
    rotated: float = 1.0  # share of the pairs that turn, the first ones; inv_freq is 0 for the others (p-RoPE)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer."""

    kind: LayerKind
    num_kv_heads: int
    head_dim: int
    window: int | None  # positions a row sees, itself included; None sees all
    rope: RopeSpec
    values_are_keys: bool = False  # no v_proj: values are the key projection, before k_norm and rotation
    cache_source: int | None = None  # the earlier layer whose keys and values it reads, having none of its own
    mlp_multiple: int = 1  # its MLP is this many times `intermediate_size` wide


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Experts beside the dense MLP of every layer, of which a router chooses some for each row."""

    num_experts: int
    num_chosen: int
    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class PerLayerSpec:
    """Per-layer embeddings: a second embedding table gives every layer an input of its own."""

    vocab_size: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """A token that stands in a prompt for one row of an image, a sound or a video."""

    text: str
    token_id: int


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A Gemma text decoder. Differences between generations are fields here, not code elsewhere."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    norm_offset: float  # a stored norm weight multiplies as (norm_offset + weight)
    attention_scale: float
    activation: str
    final_logit_softcapping: float | None
    max_positions: int
    eos_token_ids: tuple[int, ...]
    norms_values: bool = False  # an RMS norm without weight over each head's values
    has_layer_scalars: bool = False  # a layer's output is multiplied by its `layer_scalar`
    experts: ExpertsSpec | None = None
    per_layer: PerLayerSpec | None = None
    pad_token_id: int = 0  # whose per-layer embedding rows take that are no token's
    placeholders: tuple[Placeholder, ...] = ()  # of modalities beside text; none in a text-only model
    tensor_prefix: str = "model"  # what the names of the decoder's tensors begin with
    skipped_tensors: tuple[str, ...] = ()  # patterns of names that belong to other parts of the checkpoint

    @property
    def embedding_scale(self) -> float:
        """Gemma multiplies input embeddings by sqrt(hidden size)."""
        return math.sqrt(self.hidden_size)


def layer_kinds(fields: Fields, num_layers: int) -> list[LayerKind]:
    """`layer_types`, or every sixth (`sliding_window_pattern`) full where they are not listed."""
    names = fields.texts("layer_types", default=None)
    if names is None:
        period = fields.integer("sliding_window_pattern", low=1, default=6)
        return [LayerKind.SLIDING if (i + 1) % period else LayerKind.FULL for i in range(num_layers)]
    if len(names) != num_layers:
        raise WeightsError(f"{fields.source} lists {len(names)} layer_types for num_hidden_layers={num_layers}.")
    known = [kind.value for kind in LayerKind]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UnsupportedModelError(f"layer_types {unknown} are not supported; {' and '.join(known)} are.")
    return [LayerKind(name) for name in names]


def rope_spec(fields: Fields, *, theta: float) -> RopeSpec:
    """One entry of `rope_parameters`; its own `rope_theta` wins over `theta`."""
    rope_type = fields.text("rope_type", default=None) or fields.text("type", default="default")
    if rope_type not in ("default", "linear"):
        raise UnsupportedModelError(f"rope_type {rope_type!r} is not supported; default and linear are.")
    factor = fields.number("factor") if rope_type == "linear" else 1.0
    return RopeSpec(theta=fields.number("rope_theta", default=theta), factor=factor)


def _gemma3_rope(fields: Fields) -> dict[LayerKind, RopeSpec]:
    if "rope_parameters" in fields:
        by_kind = fields.table("rope_parameters")
        return {kind: rope_spec(by_kind.table(kind.value), theta=DEFAULT_THETAS[kind]) for kind in LayerKind}
    theta = fields.number("rope_theta", default=DEFAULT_THETAS[LayerKind.FULL])  # the layout before transformers 5
    local_theta = fields.number("rope_local_base_freq", default=DEFAULT_THETAS[LayerKind.SLIDING])
    return {
        LayerKind.FULL: rope_spec(fields.table("rope_scaling", optional=True), theta=theta),
        LayerKind.SLIDING: RopeSpec(theta=local_theta),
    }


def refuse_head_shape(fields: Fields, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """WeightsError for heads that cannot share their keys, or that do not rotate in pairs."""
    if num_heads % num_kv_heads:
        raise WeightsError(
            f"{fields.source}: {num_heads} attention heads cannot share {num_kv_heads} key and value heads evenly."
        )
    if head_dim % 2:
        raise WeightsError(f"{fields.source}: head_dim={head_dim} is odd; rotary embedding turns pairs.")


def refuse_other_activation(fields: Fields) -> None:
    """UnsupportedModelError unless the MLPs use tanh GELU, as those of every Gemma do."""
    activation = fields.text("hidden_activation", default="gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedModelError(f"hidden_activation {activation!r} is not supported for a Gemma target.")


def refuse_untied(fields: Fields) -> None:
    """UnsupportedModelError for a head that is not the embedding."""
    if not fields.boolean("tie_word_embeddings", default=True):
        raise UnsupportedModelError(
            f"{fields.source} has tie_word_embeddings=False: a head of its own (lm_head.weight) is not supported; "
            "every released Gemma shares the embedding."
        )


def _refuse_what_gemma3_lacks(fields: Fields) -> None:
    refuse_other_activation(fields)
    refuse_untied(fields)
    if fields.number("attn_logit_softcapping", default=None) is not None:
        raise UnsupportedModelError("attn_logit_softcapping is not supported; no released Gemma 3 sets it.")
    if fields.boolean("use_bidirectional_attention", default=None):
        raise UnsupportedModelError("use_bidirectional_attention makes an encoder; only decoders can be served.")


def end_token_ids(fields: Fields) -> tuple[int, ...]:
    """One id, a list of them, or none."""
    if fields.is_list("eos_token_id"):
        return tuple(fields.integers("eos_token_id"))
    token_id = fields.integer("eos_token_id", low=0, default=None)
    return () if token_id is None else (token_id,)


def gemma3_config(fields: Fields, *, norm_offset: float) -> TargetConfig:
    """Read a Hugging Face style `gemma3_text` config (formats.md §1.0)."""
    _refuse_what_gemma3_lacks(fields)
    num_layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    num_kv_heads = fields.integer("num_key_value_heads", low=1)
    head_dim = fields.integer("head_dim", low=1)
    refuse_head_shape(fields, fields.integer("num_attention_heads", low=1), num_kv_heads, head_dim)
    window = fields.integer("sliding_window", low=1, default=4096)
    rope = _gemma3_rope(fields)
    layers = tuple(
        LayerSpec(
            kind=kind,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window if kind is LayerKind.SLIDING else None,
            rope=rope[kind],
        )
        for kind in layer_kinds(fields, num_layers)
    )
    return TargetConfig(
        model_type="gemma3_text",
        vocab_size=fields.integer("vocab_size", low=1),
        hidden_size=fields.integer("hidden_size", low=1),
        intermediate_size=fields.integer("intermediate_size", low=1),
        num_heads=fields.integer("num_attention_heads", low=1),
        layers=layers,
        rms_norm_eps=fields.number("rms_norm_eps", high=1.0, default=1e-6),
        norm_offset=norm_offset,
        attention_scale=fields.number("query_pre_attn_scalar", default=head_dim) ** -0.5,
        activation="gelu_tanh",
        final_logit_softcapping=fields.number("final_logit_softcapping", default=None),
        max_positions=fields.integer("max_position_embeddings", low=1, default=131_072),
        eos_token_ids=end_token_ids(fields),
    )
