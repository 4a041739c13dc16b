"""What a target or a drafter is, read once from its config and declared: nothing below decides on a name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from outrider.errors import DrafterMismatchError, UnsupportedModelError, WeightsError
from outrider.weights.fields import Fields


class LayerKind(Enum):
    """Which earlier positions a layer sees: all of them, or the last `sliding_window`."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


# More than any model has: what a broken config asks for beyond them would only exhaust the memory.
MAX_LAYERS = 1024
_MAX_BLOCK_SIZE = 1024
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


def _rope_spec(fields: Fields, *, theta: float) -> RopeSpec:
    """One entry of `rope_parameters`; its own `rope_theta` wins over `theta`."""
    rope_type = fields.text("rope_type", default=None) or fields.text("type", default="default")
    if rope_type not in ("default", "linear"):
        raise UnsupportedModelError(f"rope_type {rope_type!r} is not supported; default and linear are.")
    factor = fields.number("factor") if rope_type == "linear" else 1.0
    return RopeSpec(theta=fields.number("rope_theta", default=theta), factor=factor)


def _gemma3_rope(fields: Fields) -> dict[LayerKind, RopeSpec]:
    if "rope_parameters" in fields:
        by_kind = fields.table("rope_parameters")
        return {kind: _rope_spec(by_kind.table(kind.value), theta=DEFAULT_THETAS[kind]) for kind in LayerKind}
    theta = fields.number("rope_theta", default=DEFAULT_THETAS[LayerKind.FULL])  # the layout before transformers 5
    local_theta = fields.number("rope_local_base_freq", default=DEFAULT_THETAS[LayerKind.SLIDING])
    return {
        LayerKind.FULL: _rope_spec(fields.table("rope_scaling", optional=True), theta=theta),
        LayerKind.SLIDING: RopeSpec(theta=local_theta),
    }


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


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A DFlash drafter (formats.md §2): pre-norm layers over target features and a block of mask slots."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[LayerSpec, ...]
    layer_is_causal: tuple[bool, ...]  # inside the block; context is always earlier than the block
    rms_norm_eps: float
    activation: str
    block_size: int  # slots, the anchor's included: block_size - 1 drafts
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # tap l is the output of decoder layer l, 0-based
    num_target_layers: int | None
    vocab_size: int
    draft_vocab_size: int  # equal to vocab_size unless a d2t table reduces it
    scale_block_embeddings: bool
    final_logit_softcapping: float | None
    num_speculative_tokens: int  # the draft length to use unless told otherwise

    @property
    def max_draft_length(self) -> int:
        """DFlash slot 0 holds the anchor and predicts nothing."""
        return self.block_size - 1


def _resolve_causal(fields: Fields, kinds: list[LayerKind]) -> tuple[bool, ...]:
    """Design §4.5: config is_causal, else dflash_config.causal, else sliding is causal and full is bidirectional."""
    declared = fields.boolean("is_causal", default=None)
    if declared is None:
        declared = fields.table("dflash_config", optional=True).boolean("causal", default=None)
    return tuple(kind is LayerKind.SLIDING if declared is None else declared for kind in kinds)


def _drafter_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    num_layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", low=1)
    use_window = fields.boolean("use_sliding_window", default=None)
    kinds = [LayerKind.SLIDING if use_window else LayerKind.FULL] * num_layers
    if "layer_types" in fields:
        kinds = layer_kinds(fields, num_layers)
    window = fields.integer("swa_window_size", low=1, default=None)
    if window is None:
        window = fields.integer("sliding_window", low=1, default=None)
    if LayerKind.SLIDING in kinds and window is None:
        raise DrafterMismatchError(f"{fields.source} has sliding layers but no sliding_window.")
    scaling = fields.table("rope_parameters" if "rope_parameters" in fields else "rope_scaling", optional=True)
    theta = fields.number("rope_theta", default=None) or DEFAULT_THETAS[LayerKind.FULL]
    rope = _rope_spec(scaling, theta=theta)
    head_dim = fields.integer("head_dim", low=1, default=None)
    num_kv_heads = fields.integer("num_key_value_heads", low=1, default=None)
    return tuple(
        LayerSpec(
            kind=kind,
            num_kv_heads=num_kv_heads or heads,
            head_dim=head_dim or fields.integer("hidden_size", low=heads) // heads,
            window=window if kind is LayerKind.SLIDING else None,
            rope=rope,
        )
        for kind in kinds
    )


def dflash_config(config: Fields, *, name: str) -> DrafterConfig:
    """Read a z-lab style DFlash config. Ids may sit nested in `dflash_config` or at top level; nested wins."""
    fields = config.overlaid("dflash_config")
    layers = _drafter_layers(fields)
    block_size = fields.integer("block_size", low=2, high=_MAX_BLOCK_SIZE)  # one slot would leave none to draft in
    num_drafts = fields.integer("num_speculative_tokens", low=1, high=block_size - 1, default=None)
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise UnsupportedModelError(f"drafter {name}: hidden_act {activation!r} is not supported.")
    vocab_size = fields.integer("vocab_size", low=1)
    draft_vocab_size = fields.integer("draft_vocab_size", low=1, high=vocab_size, default=None)
    return DrafterConfig(
        name=name,
        hidden_size=fields.integer("hidden_size", low=1),
        intermediate_size=fields.integer("intermediate_size", low=1),
        num_heads=fields.integer("num_attention_heads", low=1),
        layers=layers,
        layer_is_causal=_resolve_causal(config, [layer.kind for layer in layers]),
        rms_norm_eps=fields.number("rms_norm_eps", high=1.0, default=1e-6),
        activation="silu" if activation == "silu" else "gelu_tanh",
        block_size=block_size,
        mask_token_id=fields.integer("mask_token_id", low=0),
        target_layer_ids=tuple(fields.integers("target_layer_ids")),
        num_target_layers=fields.integer("num_target_layers", low=1, default=None),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size or vocab_size,
        scale_block_embeddings=fields.boolean("scale_block_embeddings", default=True),
        final_logit_softcapping=fields.number("final_logit_softcapping", default=None),
        num_speculative_tokens=num_drafts or block_size - 1,
    )


def check_drafter(drafter: DrafterConfig, target: TargetConfig, *, target_name: str) -> None:
    """Refuse a drafter that was made for another target, naming both and the field (T-048)."""
    problem = _drafter_problem(drafter, target)
    if problem:
        raise DrafterMismatchError(
            f"drafter {drafter.name} does not fit target {target_name}: {problem}. "
            "Use a drafter trained for this target."
        )


def _drafter_problem(drafter: DrafterConfig, target: TargetConfig) -> str | None:
    ids, num_layers = drafter.target_layer_ids, len(target.layers)
    if drafter.hidden_size != target.hidden_size:
        return f"hidden_size is {drafter.hidden_size}, the target's is {target.hidden_size}"
    if drafter.vocab_size != target.vocab_size:
        return f"vocab_size is {drafter.vocab_size}, the target's is {target.vocab_size}"
    if drafter.num_target_layers is not None and drafter.num_target_layers != num_layers:
        return f"num_target_layers is {drafter.num_target_layers}, the target has {num_layers}"
    if not ids:
        return "target_layer_ids is empty"
    if not all(0 <= i < num_layers for i in ids):
        return f"target_layer_ids {list(ids)} must be whole numbers from 0 to {num_layers - 1}"
    if len(set(ids)) != len(ids):
        return f"target_layer_ids {list(ids)} holds one layer twice"
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        return f"mask_token_id is {drafter.mask_token_id}, outside the table of {target.vocab_size} tokens"
    return None
