"""What a target or a drafter is, read once from its config and declared: nothing below decides on a name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outrider.errors import DrafterMismatchError, UnsupportedModelError, WeightsError


class LayerKind(Enum):
    """Which earlier positions a layer sees: all of them, or the last `sliding_window`."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one layer kind: inv_freq_i = theta^(-2i/D) / factor, pairs (i, i + D/2)."""

    theta: float
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer."""

    kind: LayerKind
    num_kv_heads: int
    head_dim: int
    window: int | None  # positions a row sees, itself included; None sees all
    rope: RopeSpec


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

    @property
    def embedding_scale(self) -> float:
        """Gemma multiplies input embeddings by sqrt(hidden size)."""
        return math.sqrt(self.hidden_size)


def _require(config: dict[str, Any], *names: str) -> list[Any]:
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise WeightsError(f"config lacks {', '.join(missing)}. Is its config.json complete?")
    return [config[name] for name in names]


def _layer_kinds(config: dict[str, Any], num_layers: int) -> list[LayerKind]:
    names = config.get("layer_types")
    if names is None:
        period = config.get("sliding_window_pattern", 6)
        names = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(num_layers)]
    if len(names) != num_layers:
        raise WeightsError(f"config lists {len(names)} layer_types for num_hidden_layers={num_layers}.")
    known = [kind.value for kind in LayerKind]
    unknown = sorted({str(name) for name in names} - set(known))
    if unknown:
        raise UnsupportedModelError(f"layer_types {unknown} are not supported; {' and '.join(known)} are.")
    return [LayerKind(name) for name in names]


def _rope_spec(entry: dict[str, Any], default_theta: float) -> RopeSpec:
    """One entry of `rope_parameters`."""
    rope_type = entry.get("rope_type") or entry.get("type") or "default"
    if rope_type not in ("default", "linear"):
        raise UnsupportedModelError(f"rope_type {rope_type!r} is not supported; default and linear are.")
    factor = entry.get("factor", 1.0) if rope_type == "linear" else 1.0
    return RopeSpec(theta=float(entry.get("rope_theta") or default_theta), factor=float(factor))


def _gemma3_rope(config: dict[str, Any]) -> dict[LayerKind, RopeSpec]:
    parameters = config.get("rope_parameters")
    if parameters is None:  # the layout before transformers 5
        scaling = config.get("rope_scaling") or {}
        parameters = {
            LayerKind.FULL.value: {"rope_theta": config.get("rope_theta", 1_000_000.0), **scaling},
            LayerKind.SLIDING.value: {"rope_theta": config.get("rope_local_base_freq", 10_000.0)},
        }
    missing = [kind.value for kind in LayerKind if kind.value not in parameters]
    if missing:
        raise WeightsError(f"config's rope_parameters lack {', '.join(missing)}. Is its config.json complete?")
    defaults = {LayerKind.FULL: 1_000_000.0, LayerKind.SLIDING: 10_000.0}
    return {kind: _rope_spec(parameters[kind.value], defaults[kind]) for kind in LayerKind}


def gemma3_config(config: dict[str, Any], *, norm_offset: float) -> TargetConfig:
    """Read a Hugging Face style `gemma3_text` config (formats.md §1.0)."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    vocab_size, hidden_size, intermediate_size, num_layers = _require(config, *names)
    heads, kv_heads, head_dim = _require(config, "num_attention_heads", "num_key_value_heads", "head_dim")
    rope = _gemma3_rope(config)
    window = int(config.get("sliding_window", 4096))
    layers = tuple(
        LayerSpec(
            kind=kind,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            window=window if kind is LayerKind.SLIDING else None,
            rope=rope[kind],
        )
        for kind in _layer_kinds(config, num_layers)
    )
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedModelError(f"hidden_activation {activation!r} is not supported for gemma3.")
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError("attn_logit_softcapping is not supported; no released Gemma 3 sets it.")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention makes an encoder; only decoders can be served.")
    eos = config.get("eos_token_id", ())
    return TargetConfig(
        model_type="gemma3_text",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=heads,
        layers=layers,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        norm_offset=norm_offset,
        attention_scale=float(config.get("query_pre_attn_scalar", head_dim)) ** -0.5,
        activation="gelu_tanh",
        final_logit_softcapping=config.get("final_logit_softcapping"),
        max_positions=int(config.get("max_position_embeddings", 131_072)),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
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


def _resolve_causal(config: dict[str, Any], dflash: dict[str, Any], kinds: list[LayerKind]) -> tuple[bool, ...]:
    """Design §4.5: config is_causal, else dflash_config.causal, else sliding is causal and full is bidirectional."""
    declared = config.get("is_causal")
    if declared is None:
        declared = dflash.get("causal")
    return tuple(kind is LayerKind.SLIDING if declared is None else bool(declared) for kind in kinds)


def _drafter_kinds(config: dict[str, Any], num_layers: int) -> list[LayerKind]:
    if config.get("layer_types") is not None:
        return _layer_kinds(config, num_layers)
    kind = LayerKind.SLIDING if config.get("use_sliding_window") else LayerKind.FULL
    return [kind] * num_layers


def dflash_config(config: dict[str, Any], *, name: str) -> DrafterConfig:
    """Read a z-lab style DFlash config. Ids may sit nested in `dflash_config` or at top level; nested wins."""
    dflash = config.get("dflash_config") or {}
    merged = {**config, **{key: value for key, value in dflash.items() if value is not None}}
    missing = [field for field in ("target_layer_ids", "mask_token_id", "block_size") if merged.get(field) is None]
    if missing:
        raise DrafterMismatchError(f"drafter {name}: its config lacks {', '.join(missing)}; it cannot be guessed.")
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    hidden_size, intermediate_size, num_layers, heads, vocab_size = _require(config, *shape)
    head_dim = config.get("head_dim") or hidden_size // heads
    kinds = _drafter_kinds(config, num_layers)
    window = merged.get("swa_window_size") or merged.get("sliding_window")
    if window is None and LayerKind.SLIDING in kinds:
        raise DrafterMismatchError(f"drafter {name}: it has sliding layers but no sliding_window.")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = _rope_spec({"rope_theta": config.get("rope_theta"), **scaling}, 1_000_000.0)
    layers = tuple(
        LayerSpec(
            kind=kind,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            window=int(window) if kind is LayerKind.SLIDING and window is not None else None,
            rope=rope,
        )
        for kind in kinds
    )
    block_size = int(merged["block_size"])
    if block_size < 2:
        raise DrafterMismatchError(f"drafter {name}: block_size={block_size} leaves no slot to draft in.")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise UnsupportedModelError(f"drafter {name}: hidden_act {activation!r} is not supported.")
    return DrafterConfig(
        name=name,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=heads,
        layers=layers,
        layer_is_causal=_resolve_causal(config, dflash, kinds),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation="silu" if activation == "silu" else "gelu_tanh",
        block_size=block_size,
        mask_token_id=int(merged["mask_token_id"]),
        target_layer_ids=tuple(merged["target_layer_ids"]),
        num_target_layers=merged.get("num_target_layers"),
        vocab_size=vocab_size,
        draft_vocab_size=merged.get("draft_vocab_size") or vocab_size,
        scale_block_embeddings=bool(merged.get("scale_block_embeddings", True)),
        final_logit_softcapping=config.get("final_logit_softcapping"),
        num_speculative_tokens=int(merged.get("num_speculative_tokens") or block_size - 1),
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
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < num_layers for i in ids):
        return f"target_layer_ids {list(ids)} must be whole numbers from 0 to {num_layers - 1}"
    if len(set(ids)) != len(ids):
        return f"target_layer_ids {list(ids)} holds one layer twice"
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        return f"mask_token_id is {drafter.mask_token_id}, outside the table of {target.vocab_size} tokens"
    if not 1 <= drafter.num_speculative_tokens <= drafter.max_draft_length:
        return (
            f"num_speculative_tokens is {drafter.num_speculative_tokens}, its block drafts {drafter.max_draft_length}"
        )
    return None
