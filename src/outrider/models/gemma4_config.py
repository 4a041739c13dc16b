"""Read a Hugging Face style Gemma 4 text config: which differences of the one decoder it declares (formats.md §1.1)."""

from __future__ import annotations

from dataclasses import replace

from outrider.errors import UnsupportedModelError, WeightsError
from outrider.models.config import (
    DEFAULT_THETAS,
    MAX_LAYERS,
    ExpertsSpec,
    LayerKind,
    LayerSpec,
    PerLayerSpec,
    Placeholder,
    RopeSpec,
    TargetConfig,
    end_token_ids,
    layer_kinds,
    refuse_head_shape,
    refuse_other_activation,
    refuse_untied,
)
from outrider.weights.fields import Fields

_ROPE_TYPES = {LayerKind.FULL: "proportional", LayerKind.SLIDING: "default"}
# Of the whole model here, though `per_layer_config` could set them for one layer.
_NO_OVERRIDES = ("sliding_window", "num_attention_heads", "intermediate_size", "rope_parameters", "layer_types")
_OTHER_MODALITIES = ("model.vision_tower.*", "model.audio_tower.*", "model.embed_vision.*", "model.embed_audio.*")
_PLACEHOLDER_IDS = {"image": 258_880, "audio": 258_881, "video": 258_884}  # of every release, where none is declared


def gemma4_config(fields: Fields, *, norm_offset: float) -> TargetConfig:
    """Read a `gemma4_text` config; raises UnsupportedModelError naming the field that asks for more than we run."""
    shared = _shared(fields, model_type="gemma4_text", norm_offset=norm_offset)
    return replace(shared, experts=_experts(fields), per_layer=_per_layer(fields))


def gemma4_unified_config(fields: Fields, *, norm_offset: float) -> TargetConfig:
    """Read a `gemma4_unified_text` config (12B): the dense decoder, without experts and per-layer embeddings."""
    if fields.boolean("enable_moe_block", default=None):
        raise UnsupportedModelError(f"{fields.source} has enable_moe_block=true, which gemma4_unified_text lacks.")
    if fields.integer("hidden_size_per_layer_input", low=0, default=None):
        raise UnsupportedModelError(
            f"{fields.source} has hidden_size_per_layer_input, which gemma4_unified_text lacks."
        )
    return _shared(fields, model_type="gemma4_unified_text", norm_offset=norm_offset)


def gemma4_multimodal_config(fields: Fields, *, norm_offset: float) -> TargetConfig:
    """Read the text part of a `gemma4` or `gemma4_unified` config, as every released checkpoint has it.

    Towers and embedders of other modalities are skipped, not run.
    """
    refuse_untied(fields)
    text = fields.table("text_config")
    model_type = text.text("model_type")
    if model_type not in _TEXT_READERS:
        raise UnsupportedModelError(
            f"{fields.source}: text_config.model_type {model_type!r} is not one of {sorted(_TEXT_READERS)}."
        )
    config = _TEXT_READERS[model_type](text, norm_offset=norm_offset)
    return replace(
        config,
        eos_token_ids=end_token_ids(fields) or config.eos_token_ids,
        placeholders=_placeholders(fields),
        tensor_prefix="model.language_model",
        skipped_tensors=_OTHER_MODALITIES,
    )


_TEXT_READERS = {"gemma4_text": gemma4_config, "gemma4_unified_text": gemma4_unified_config}


def _placeholders(fields: Fields) -> tuple[Placeholder, ...]:
    """`image_token_id` and its kin, with the texts their tokens have (formats.md §1.3, §1.4)."""
    found = []
    for kind, usual in _PLACEHOLDER_IDS.items():
        declared = fields.integer(f"{kind}_token_id", low=1, default=None)
        found.append(Placeholder(text=f"<|{kind}|>", token_id=declared or usual))
    if len({each.token_id for each in found}) < len(found):
        raise WeightsError(f"{fields.source} gives two of image_token_id, audio_token_id and video_token_id one id.")
    return tuple(found)


def _shared(fields: Fields, *, model_type: str, norm_offset: float) -> TargetConfig:
    _refuse_what_we_lack(fields)
    vocab_size = fields.integer("vocab_size", low=1)
    pad_token_id = fields.integer("pad_token_id", low=0, high=vocab_size - 1, default=None)
    return TargetConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", low=1),
        intermediate_size=fields.integer("intermediate_size", low=1),
        num_heads=fields.integer("num_attention_heads", low=1),
        layers=gemma4_layers(fields),
        rms_norm_eps=fields.number("rms_norm_eps", high=1.0, default=1e-6),
        norm_offset=norm_offset,
        attention_scale=1.0,
        activation="gelu_tanh",
        final_logit_softcapping=fields.number("final_logit_softcapping", default=None),
        max_positions=fields.integer("max_position_embeddings", low=1, default=131_072),
        eos_token_ids=end_token_ids(fields),
        norms_values=True,
        has_layer_scalars=True,
        pad_token_id=pad_token_id or 0,
    )


def _refuse_what_we_lack(fields: Fields) -> None:
    refuse_other_activation(fields)
    refuse_untied(fields)
    if fields.boolean("attention_bias", default=None):
        raise UnsupportedModelError("attention_bias=True is not supported; no released Gemma 4 sets it.")
    scope = fields.text("use_bidirectional_attention", default=None)
    if scope not in (None, "vision"):  # "vision" concerns image tokens only: text is causal
        raise UnsupportedModelError(f"use_bidirectional_attention={scope!r} is not supported; null and 'vision' are.")


def _experts(fields: Fields) -> ExpertsSpec | None:
    if not fields.boolean("enable_moe_block", default=None):
        return None
    num_experts = fields.integer("num_experts", low=1)
    return ExpertsSpec(
        num_experts=num_experts,
        num_chosen=fields.integer("top_k_experts", low=1, high=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", low=1),
    )


def _per_layer(fields: Fields) -> PerLayerSpec | None:
    size = fields.integer("hidden_size_per_layer_input", low=0)
    if size == 0:
        return None
    vocab_size = fields.integer("vocab_size", low=1)  # every token has a row in both tables
    return PerLayerSpec(vocab_size=fields.integer("vocab_size_per_layer_input", low=vocab_size), size=size)


def gemma4_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    """The layers that a Gemma 4 text config declares; also those of a drafter made of such layers."""
    kinds = layer_kinds(fields, fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS))
    if kinds[-1] is not LayerKind.FULL:
        raise WeightsError(f"{fields.source}: layer_types must end with {LayerKind.FULL.value!r}.")
    window = fields.integer("sliding_window", low=1)
    rope = {kind: _rope(fields, kind) for kind in LayerKind}
    shares = fields.boolean("attention_k_eq_v", default=False)
    sources = _cache_sources(fields, kinds)
    is_double_wide = fields.boolean("use_double_wide_mlp", default=False)
    shapes = [_head_shape(fields, kind, index, shares=shares) for index, kind in enumerate(kinds)]
    return tuple(
        LayerSpec(
            kind=kind,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window if kind is LayerKind.SLIDING else None,
            rope=rope[kind],
            values_are_keys=shares and kind is LayerKind.FULL,
            cache_source=source,
            mlp_multiple=2 if is_double_wide and source is not None else 1,
        )
        for kind, (head_dim, num_kv_heads), source in zip(kinds, shapes, sources, strict=True)
    )


def _cache_sources(fields: Fields, kinds: list[LayerKind]) -> list[int | None]:
    """The last `num_kv_shared_layers` layers read the last earlier layer of their kind that is not among them."""
    num_own = len(kinds) - fields.integer("num_kv_shared_layers", low=0, high=len(kinds) - 1, default=0)
    last_own = {kind: index for index, kind in enumerate(kinds[:num_own])}
    missing = sorted({kind.value for kind in kinds[num_own:] if kind not in last_own})
    if missing:
        raise WeightsError(f"{fields.source}: num_kv_shared_layers leaves no {missing[0]} layer to read from.")
    return [None] * num_own + [last_own[kind] for kind in kinds[num_own:]]


def _head_shape(fields: Fields, kind: LayerKind, index: int, *, shares: bool) -> tuple[int, int]:
    """(head_dim, num_kv_heads) of a layer.

    Released configs give full layers `global_head_dim` and, with K=V, `num_global_key_value_heads`; what transformers
    writes since 5.24 has `per_layer_config` in their place.
    """
    head_dim = fields.integer("head_dim", low=2)
    num_kv_heads = fields.integer("num_key_value_heads", low=1)
    if "per_layer_config" in fields:
        own = fields.table("per_layer_config").table(str(index), optional=True)
        for name in _NO_OVERRIDES:
            if name in own:
                raise UnsupportedModelError(f"{fields.source}: per_layer_config.{index}.{name} is not supported.")
        head_dim = own.integer("head_dim", low=2, default=head_dim)
        num_kv_heads = own.integer("num_key_value_heads", low=1, default=num_kv_heads)
    elif kind is LayerKind.FULL:
        head_dim = fields.integer("global_head_dim", low=2, default=512)
        declared = fields.integer("num_global_key_value_heads", low=1, default=None) if shares else None
        num_kv_heads = declared or num_kv_heads
    refuse_head_shape(fields, fields.integer("num_attention_heads", low=1), num_kv_heads, head_dim)
    return head_dim, num_kv_heads


def _rope(fields: Fields, kind: LayerKind) -> RopeSpec:
    """Sliding layers turn every pair of a head; full ones the first `partial_rotary_factor` of them (p-RoPE)."""
    if "rope_parameters" not in fields:
        return RopeSpec(theta=DEFAULT_THETAS[kind], rotated=0.25 if kind is LayerKind.FULL else 1.0)
    declared = fields.table("rope_parameters").table(kind.value)
    rope_type = declared.text("rope_type")
    if rope_type != _ROPE_TYPES[kind]:
        raise UnsupportedModelError(
            f"rope_type {rope_type!r} of {kind.value} is not supported; {_ROPE_TYPES[kind]} is."
        )
    theta = declared.number("rope_theta")
    if kind is LayerKind.SLIDING:
        return RopeSpec(theta=theta)
    rotated = declared.number("partial_rotary_factor", high=1.0)
    return RopeSpec(theta=theta, factor=declared.number("factor", default=1.0), rotated=rotated)
