"""What a drafter is, read once from its config and declared: nothing below decides on a name (formats.md §2 and §3)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.errors import DrafterMismatchError, UnsupportedModelError
from outrider.models.config import (
    DEFAULT_THETAS,
    MAX_LAYERS,
    LayerKind,
    LayerSpec,
    TargetConfig,
    layer_kinds,
    refuse_head_shape,
    rope_spec,
)
from outrider.models.gemma4_config import gemma4_layers
from outrider.weights.fields import Fields

_MAX_BLOCK_SIZE = 1024
# What a config of speculators leaves out where it is transformers' default for Qwen3.
_QWEN3_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151_936,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
}


class BlockLayout(Enum):
    """Which token a slot of the block predicts. Slot 0 holds the anchor, the others the mask token."""

    SAME_POSITION = "same position"  # DFlash: slot k predicts the token at anchor + k, and slot 0 nothing
    NEXT_POSITION = "next position"  # DSpark: slot k predicts the token at anchor + k + 1

    @property
    def num_silent_slots(self) -> int:
        """Slots at the front of the block that predict nothing."""
        return 1 if self is BlockLayout.SAME_POSITION else 0

    def num_slots(self, num_drafts: int) -> int:
        """Slots of a block that drafts so many tokens."""
        return num_drafts + self.num_silent_slots


class LayerStyle(Enum):
    """How a draft layer is built."""

    PRE_NORM = "pre-norm"  # Qwen3: a norm before attention and one before the MLP
    GEMMA4 = "Gemma 4"  # four sandwich norms, normed values, a layer scalar


class MarkovKind(Enum):
    """How the bias of a slot is made from the token drafted before it."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


@dataclass(frozen=True, kw_only=True)
class MarkovSpec:
    """A Markov head: a low-rank bias on a slot's logits by the token drafted before it."""

    kind: MarkovKind
    rank: int


@dataclass(frozen=True, kw_only=True)
class ConfidenceSpec:
    """A confidence head: each draft's chance to be accepted, given that those before it were."""

    reads_markov: bool  # beside the slot's hidden state it sees the Markov embedding of the token before


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A block drafter: layers over target features and a block of slots, and perhaps heads on top."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[LayerSpec, ...]
    layer_is_causal: tuple[bool, ...]  # inside the block; context is always earlier than the block
    rms_norm_eps: float
    activation: str
    layout: BlockLayout
    block_size: int  # slots, the anchor's included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # tap l is the output of decoder layer l, 0-based
    num_target_layers: int | None
    vocab_size: int
    draft_vocab_size: int  # equal to vocab_size unless a d2t table reduces it
    embedding_scale: float | None  # factor of block embeddings; None is the target's own
    final_logit_softcapping: float | None
    num_speculative_tokens: int  # the draft length to use unless told otherwise
    style: LayerStyle = LayerStyle.PRE_NORM
    output_multiplier: float = 1.0  # of logits, before the soft-cap
    windows_from_anchor: bool = False  # every slot sees the same context; else a window counts back from the slot
    markov: MarkovSpec | None = None
    confidence: ConfidenceSpec | None = None
    skipped_tensors: tuple[str, ...] = ()  # names that only training needs

    @property
    def max_draft_length(self) -> int:
        """Drafts of a whole block."""
        return self.block_size - self.layout.num_silent_slots

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores: queries and keys of Gemma 4 are normed to need none."""
        return 1.0 if self.style is LayerStyle.GEMMA4 else self.layers[0].head_dim ** -0.5


def dflash_config(config: Fields, *, name: str) -> DrafterConfig:
    """Read a z-lab style DFlash config, or the hybrid's, which adds a Markov head to it.

    Ids may sit nested in `dflash_config` or at top level; nested wins.
    """
    fields = config.overlaid("dflash_config")
    layers = _pre_norm_layers(fields)
    is_scaled = fields.boolean("scale_block_embeddings", default=True)  # ours; z-lab's name is the number itself
    scale = fields.number("input_embedding_scale", default=None)
    return _drafter(
        fields,
        name=name,
        layers=layers,
        layer_is_causal=_resolve_causal(config, layers),
        layout=_layout(fields, from_anchor=False),
        target_layer_ids=fields.integers("target_layer_ids"),
        embedding_scale=scale if scale is not None or is_scaled else 1.0,
        num_target_layers=fields.integer("num_target_layers", low=1, default=None),
    )


def deepspec_gemma4_config(config: Fields, *, name: str) -> DrafterConfig:
    """Read the config of DeepSpec's `Gemma4DSparkModel`: a Gemma 4 text config with DSpark's fields."""
    for field in ("enable_moe_block", "attention_bias", "use_double_wide_mlp"):
        if config.boolean(field, default=None):
            raise UnsupportedModelError(f"drafter {name}: {field}=true is not supported; no published drafter sets it.")
    for field in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if config.integer(field, low=0, default=None):
            raise UnsupportedModelError(f"drafter {name}: {field} must be 0; no published drafter sets it.")
    layers = gemma4_layers(config)
    return _drafter(
        config,
        name=name,
        style=LayerStyle.GEMMA4,
        layers=layers,
        layer_is_causal=_resolve_causal(config, layers),
        layout=_layout(config, from_anchor=True),
        target_layer_ids=config.integers("target_layer_ids"),
        embedding_scale=None,
        num_target_layers=config.integer("num_target_layers", low=1, default=None),
    )


def deepspec_qwen3_config(config: Fields, *, name: str) -> DrafterConfig:
    """Read the config of DeepSpec's `Qwen3DSparkModel`: pre-norm layers, embeddings as they are."""
    layers = _pre_norm_layers(config)
    return _drafter(
        config,
        name=name,
        layers=layers,
        layer_is_causal=_resolve_causal(config, layers),
        layout=_layout(config, from_anchor=True),
        target_layer_ids=config.integers("target_layer_ids"),
        embedding_scale=1.0,
        num_target_layers=config.integer("num_target_layers", low=1, default=None),
    )


def speculators_config(config: Fields, *, name: str) -> DrafterConfig:
    """Read a config of the speculators library: `speculators_model_type` dflash or dspark (formats.md §2.5).

    Its layer ids count hidden states, of which the first is the embedding: id i + 1 is our tap i. Block embeddings are
    not scaled, and a window counts back from the anchor for every slot, as such drafters are trained.
    """
    algorithm = config.text("speculators_model_type")
    if algorithm not in ("dflash", "dspark"):
        raise UnsupportedModelError(
            f"drafter {name}: speculators_model_type {algorithm!r} is not supported; dflash and dspark are."
        )
    if config.table("transformer_layer_config").text("model_type", default="qwen3") != "qwen3":
        raise UnsupportedModelError(f"drafter {name}: transformer_layer_config must have model_type 'qwen3'.")
    fields = config.underlaid("transformer_layer_config", _QWEN3_DEFAULTS)
    layers = _pre_norm_layers(fields)
    is_causal = not config.boolean("sliding_window_non_causal", default=False)
    return _drafter(
        fields,
        name=name,
        layers=layers,
        layer_is_causal=tuple(is_causal and spec.kind is LayerKind.SLIDING for spec in layers),
        layout=_layout(config, from_anchor=algorithm == "dspark"),
        target_layer_ids=[layer_id - 1 for layer_id in config.integers("aux_hidden_state_layer_ids")],
        embedding_scale=1.0,
        num_target_layers=None,
        windows_from_anchor=True,
        skipped_tensors=("verifier_norm.weight", "verifier_lm_head.weight"),
    )


def _drafter(
    fields: Fields,
    *,
    name: str,
    layers: tuple[LayerSpec, ...],
    layer_is_causal: tuple[bool, ...],
    layout: BlockLayout,
    target_layer_ids: list[int],
    embedding_scale: float | None,
    num_target_layers: int | None,
    style: LayerStyle = LayerStyle.PRE_NORM,
    windows_from_anchor: bool = False,
    skipped_tensors: tuple[str, ...] = (),
) -> DrafterConfig:
    """What all dialects write in one way."""
    block_size = fields.integer("block_size", low=layout.num_slots(1), high=_MAX_BLOCK_SIZE)
    max_drafts = block_size - layout.num_silent_slots
    vocab_size = fields.integer("vocab_size", low=1)
    draft_vocab_size = fields.integer("draft_vocab_size", low=1, high=vocab_size, default=None)
    num_drafts = fields.integer("num_speculative_tokens", low=1, high=max_drafts, default=None)
    markov = _markov(fields, name)
    return DrafterConfig(
        name=name,
        hidden_size=fields.integer("hidden_size", low=1),
        intermediate_size=fields.integer("intermediate_size", low=1),
        num_heads=fields.integer("num_attention_heads", low=1),
        layers=layers,
        layer_is_causal=layer_is_causal,
        rms_norm_eps=fields.number("rms_norm_eps", high=1.0, default=1e-6),
        activation=_activation(fields, style, name),
        layout=layout,
        block_size=block_size,
        mask_token_id=fields.integer("mask_token_id", low=0),
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=num_target_layers,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size or vocab_size,
        embedding_scale=embedding_scale,
        final_logit_softcapping=fields.number("final_logit_softcapping", default=None),
        num_speculative_tokens=num_drafts or max_drafts,
        style=style,
        output_multiplier=fields.number("output_multiplier", default=1.0),
        windows_from_anchor=windows_from_anchor,
        markov=markov,
        confidence=_confidence(fields, markov, name),
        skipped_tensors=skipped_tensors,
    )


def _activation(fields: Fields, style: LayerStyle, name: str) -> str:
    if style is LayerStyle.GEMMA4:
        key, default = "hidden_activation", "gelu_pytorch_tanh"
    else:
        key, default = "hidden_act", "silu"
    activation = fields.text(key, default=default)
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise UnsupportedModelError(f"drafter {name}: {key} {activation!r} is not supported.")
    return "silu" if activation == "silu" else "gelu_tanh"


def _layout(fields: Fields, *, from_anchor: bool) -> BlockLayout:
    """`sample_from_anchor`, with the dialect's own default."""
    is_next = fields.boolean("sample_from_anchor", default=from_anchor)
    return BlockLayout.NEXT_POSITION if is_next else BlockLayout.SAME_POSITION


def _markov(fields: Fields, name: str) -> MarkovSpec | None:
    rank = fields.integer("markov_rank", low=0, default=None)
    if not rank:
        return None
    kind = fields.text("markov_head_type", default=MarkovKind.VANILLA.value)
    known = [each.value for each in MarkovKind]
    if kind not in known:
        raise UnsupportedModelError(f"drafter {name}: markov_head_type {kind!r} is not one of {known}.")
    return MarkovSpec(kind=MarkovKind(kind), rank=rank)


def _confidence(fields: Fields, markov: MarkovSpec | None, name: str) -> ConfidenceSpec | None:
    if not fields.boolean("enable_confidence_head", default=None):
        return None
    reads_markov = bool(fields.boolean("confidence_head_with_markov", default=None))
    if reads_markov and markov is None:
        raise DrafterMismatchError(f"drafter {name}: confidence_head_with_markov needs a markov_rank above 0.")
    return ConfidenceSpec(reads_markov=reads_markov)


def _resolve_causal(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[bool, ...]:
    """Design §4.5: config is_causal, else dflash_config.causal, else sliding is causal and full is bidirectional."""
    declared = fields.boolean("is_causal", default=None)
    if declared is None:
        declared = fields.table("dflash_config", optional=True).boolean("causal", default=None)
    return tuple(spec.kind is LayerKind.SLIDING if declared is None else declared for spec in layers)


def _pre_norm_layers(fields: Fields) -> tuple[LayerSpec, ...]:
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
    rope = rope_spec(scaling, theta=theta)
    head_dim = fields.integer("head_dim", low=1, default=None) or fields.integer("hidden_size", low=heads) // heads
    num_kv_heads = fields.integer("num_key_value_heads", low=1, default=None) or heads
    refuse_head_shape(fields, heads, num_kv_heads, head_dim)
    return tuple(
        LayerSpec(
            kind=kind,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window if kind is LayerKind.SLIDING else None,
            rope=rope,
        )
        for kind in kinds
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
