"""What each published layout of a drafter can say, and in which keys (formats.md §2.2, §2.5, §3.5 and §3.6).

A layout is a config that its own readers understand, and a rule for the tables that its files bring. What a layout
cannot say is found twice: by what is known of its readers, and by reading the config back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.models.config import LayerKind, LayerSpec
from outrider.models.drafter_config import BlockLayout, DrafterConfig, LayerStyle, MarkovKind
from outrider.models.registry import drafter_config

MAX_POSITIONS = 262_144  # of the Gemma 4 drafters that are published
Config = dict[str, Any]


class Tables(Enum):
    """Which of the target's tables a file brings: the embedding of block tokens and the head."""

    BORROWED = "neither"
    OWN_HEAD = "head"
    OWN_BOTH = "embedding and head"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a config says beside the forward pass."""

    target_name: str | None = None
    target_architectures: tuple[str, ...] = ()
    max_positions: int = MAX_POSITIONS


@dataclass(frozen=True)
class Layout:
    """One way to write a drafter down."""

    name: str
    config: Callable[[DrafterConfig, About], Config]
    problems: Callable[[DrafterConfig], Iterator[str]]
    """What its readers cannot do, a clause each."""
    tables: Callable[[DrafterConfig], Tables]
    takes_own_tables: bool = True
    """Its readers use a table of the file in place of the target's, whatever the rule."""
    keeps_stored: bool = False
    """Tensors stay as they are stored, packed ones too; other layouts hold plain numbers."""


def find_layout(name: str) -> Layout:
    """The layout of this name; ConfigError for others."""
    if name not in LAYOUTS:
        raise ConfigError(f"layout {name!r} is not known. Use one of {', '.join(LAYOUTS)}.")
    return LAYOUTS[name]


def layout_config(layout: Layout, drafter: DrafterConfig, about: About) -> Config:
    """The config.json of a drafter; ConfigError naming everything that the layout cannot say.

    No option that changes the forward pass may be lost (T-075): the config is read back and compared field by field.
    """
    problems = list(layout.problems(drafter))
    if not problems:
        config = layout.config(drafter, about)
        read = drafter_config(config, source=Path(drafter.name))
        problems = list(_differences(drafter, read))
        if not problems:
            return config
    raise ConfigError(
        f"layout {layout.name} cannot say what drafter {drafter.name} is: {'; '.join(problems)}. Choose another; "
        "'outrider' says all that our own training makes."
    )


def forward_pass(drafter: DrafterConfig) -> DrafterConfig:
    """The same without what decides no draft: two drafters that draft alike compare equal."""
    is_targets = drafter.embedding_scale is not None and math.isclose(
        drafter.embedding_scale, math.sqrt(drafter.hidden_size), rel_tol=1e-6
    )
    return replace(
        drafter,
        name="",
        num_target_layers=None,
        num_speculative_tokens=0,
        skipped_tensors=(),
        embedding_scale=None if is_targets else drafter.embedding_scale,
        windows_from_anchor=drafter.windows_from_anchor and _sliding(drafter) is not None,
    )


def _differences(drafter: DrafterConfig, read: DrafterConfig) -> Iterator[str]:
    ours, theirs = forward_pass(drafter), forward_pass(read)
    for each in fields(DrafterConfig):
        is_lost = getattr(ours, each.name) != getattr(theirs, each.name)
        if is_lost:
            yield f"{each.name} {_brief(getattr(drafter, each.name))} would be read {_brief(getattr(read, each.name))}"


def _brief(value: Any) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def _sliding(drafter: DrafterConfig) -> LayerSpec | None:
    return next((spec for spec in drafter.layers if spec.kind is LayerKind.SLIDING), None)


def _is_by_kind(drafter: DrafterConfig) -> bool:
    """Sliding layers are causal inside the block and full ones are not: what readers assume where nothing is said."""
    kinds = [spec.kind is LayerKind.SLIDING for spec in drafter.layers]
    return list(drafter.layer_is_causal) == kinds


def _is_reduced(drafter: DrafterConfig) -> bool:
    return drafter.draft_vocab_size < drafter.vocab_size


def _is_unscaled(drafter: DrafterConfig) -> bool:
    return drafter.embedding_scale == 1.0


# What every dialect writes alike


def _heads(drafter: DrafterConfig) -> Config:
    """DSpark's heads, where there are any."""
    found: Config = {}
    if drafter.markov is not None:
        found |= {"markov_rank": drafter.markov.rank, "markov_head_type": drafter.markov.kind.value}
    if drafter.confidence is not None:
        found |= {"enable_confidence_head": True, "confidence_head_with_markov": drafter.confidence.reads_markov}
    return found


def _qwen3(drafter: DrafterConfig, about: About) -> Config:
    """The layers of a pre-norm drafter, as transformers' Qwen3 spells them; rope is left to the dialect."""
    sliding, first = _sliding(drafter), drafter.layers[0]
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": len(drafter.layers),
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "hidden_act": "silu" if drafter.activation == "silu" else "gelu_pytorch_tanh",
        "rms_norm_eps": drafter.rms_norm_eps,
        "layer_types": [spec.kind.value for spec in drafter.layers],
        "sliding_window": None if sliding is None else sliding.window,
        "use_sliding_window": sliding is not None,
        "max_window_layers": len(drafter.layers),
        "max_position_embeddings": about.max_positions,
        "vocab_size": drafter.vocab_size,
    }


def _rope_parameters(drafter: DrafterConfig) -> Config:
    rope = drafter.layers[0].rope
    scaling = {"rope_type": "default"} if rope.factor == 1.0 else {"rope_type": "linear", "factor": rope.factor}
    return {"rope_theta": rope.theta, **scaling}


# z-lab


def _zlab(drafter: DrafterConfig, about: About) -> Config:
    rope, nested = drafter.layers[0].rope, {"mask_token_id": drafter.mask_token_id}
    nested |= {"target_layer_ids": list(drafter.target_layer_ids)}  # type: ignore[dict-item]
    scale: Config = {} if drafter.embedding_scale is None else {"input_embedding_scale": drafter.embedding_scale}
    multiplier = {} if drafter.output_multiplier == 1.0 else {"output_multiplier": drafter.output_multiplier}
    causal = {} if _is_by_kind(drafter) else {"is_causal": drafter.layer_is_causal[0]}
    cap = drafter.final_logit_softcapping
    return {
        "architectures": ["DFlashDraftModel"],
        **_qwen3(drafter, about),
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.factor == 1.0 else {"rope_type": "linear", "factor": rope.factor},
        "tie_word_embeddings": True,
        "block_size": drafter.block_size,
        "num_target_layers": drafter.num_target_layers,
        **({} if cap is None else {"final_logit_softcapping": cap}),
        **causal,
        **_heads(drafter),
        "dflash_config": {**nested, **scale, **multiplier},
    }


def _zlab_problems(drafter: DrafterConfig) -> Iterator[str]:
    if drafter.style is not LayerStyle.PRE_NORM:
        yield "its layers are Gemma 4's, theirs are Qwen3's"
    if drafter.layout is not BlockLayout.SAME_POSITION:
        yield "its anchor's slot predicts too"
    if drafter.markov is not None or drafter.confidence is not None:
        yield "it has a Markov or confidence head"
    if _is_reduced(drafter):
        yield f"its vocabulary is reduced to {drafter.draft_vocab_size} tokens"


# DeepSpec


def _deepspec(drafter: DrafterConfig, about: About) -> Config:
    body = _gemma4(drafter, about) if drafter.style is LayerStyle.GEMMA4 else _deepspec_qwen3(drafter, about)
    cap = drafter.final_logit_softcapping
    return {
        **body,
        "tie_word_embeddings": False,
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.target_layer_ids),
        "num_target_layers": drafter.num_target_layers,
        **({} if cap is None else {"final_logit_softcapping": cap}),
        **({} if _is_by_kind(drafter) else {"is_causal": drafter.layer_is_causal[0]}),
        "markov_rank": 0,
        "enable_confidence_head": False,
        **_heads(drafter),
    }


def _deepspec_qwen3(drafter: DrafterConfig, about: About) -> Config:
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_qwen3(drafter, about),
        "rope_parameters": _rope_parameters(drafter),
    }


def _gemma4(drafter: DrafterConfig, about: About) -> Config:
    full = next(spec for spec in reversed(drafter.layers) if spec.kind is LayerKind.FULL)
    sliding = _sliding(drafter) or full
    theta = 10_000.0 if sliding is full else sliding.rope.theta
    rope: Config = {
        "rope_type": "proportional",
        "rope_theta": full.rope.theta,
        "partial_rotary_factor": full.rope.rotated,
    }
    return {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": full.values_are_keys,
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": len(drafter.layers),
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": sliding.num_kv_heads,
        "num_global_key_value_heads": full.num_kv_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "hidden_activation": "silu" if drafter.activation == "silu" else "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "rms_norm_eps": drafter.rms_norm_eps,
        "layer_types": [spec.kind.value for spec in drafter.layers],
        "sliding_window": sliding.window or about.max_positions,
        "rope_parameters": {
            "full_attention": rope if full.rope.factor == 1.0 else {**rope, "factor": full.rope.factor},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "max_position_embeddings": about.max_positions,
        "vocab_size": drafter.vocab_size,
    }


def _deepspec_problems(drafter: DrafterConfig) -> Iterator[str]:
    if drafter.layout is not BlockLayout.NEXT_POSITION:
        yield "its slots predict their own positions, DeepSpec's the next"
    if drafter.style is LayerStyle.PRE_NORM and not _is_unscaled(drafter):
        yield "its block embeddings are scaled, which Qwen3DSparkModel does not do"
    if drafter.style is LayerStyle.GEMMA4 and drafter.layers[-1].kind is not LayerKind.FULL:
        yield "its last layer is sliding"
    if _is_reduced(drafter):
        yield f"its vocabulary is reduced to {drafter.draft_vocab_size} tokens"


# speculators


def _speculators(drafter: DrafterConfig, about: About) -> Config:
    """Layer ids count hidden states, of which the first is the embedding: our tap i is their id i + 1."""
    is_dspark = drafter.markov is not None or drafter.layout is BlockLayout.NEXT_POSITION
    algorithm, stem = ("dspark", "DSpark") if is_dspark else ("dflash", "DFlash")
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.max_draft_length,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [f"{stem}DraftModel"],
        "auto_map": {"": f"config.{stem}SpeculatorConfig"},
        "tie_word_embeddings": False,
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in drafter.target_layer_ids],
        "block_size": drafter.block_size,
        "draft_vocab_size": drafter.draft_vocab_size,
        "mask_token_id": drafter.mask_token_id,
        "sample_from_anchor": drafter.layout is BlockLayout.NEXT_POSITION,
        "sliding_window_non_causal": not any(drafter.layer_is_causal),
        "target_hidden_size": None,
        **_heads(drafter),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": about.target_name, "architectures": list(about.target_architectures)},
        },
        "transformer_layer_config": {
            **_qwen3(drafter, about),
            "rope_parameters": _rope_parameters(drafter),
            "tie_word_embeddings": True,
        },
    }


def _speculators_problems(drafter: DrafterConfig) -> Iterator[str]:
    if drafter.style is not LayerStyle.PRE_NORM:
        yield "its layers are Gemma 4's, theirs are Qwen3's"
    if not _is_unscaled(drafter):
        yield "its block embeddings are scaled; theirs are not, so train it with unscaled ones"
    if drafter.final_logit_softcapping is not None:
        yield "its logits are soft-capped, theirs never are"
    if not drafter.windows_from_anchor and _sliding(drafter) is not None:
        yield "its windows count back from each slot, theirs from the anchor"


# stock vLLM


def _vllm(drafter: DrafterConfig, about: About) -> Config:
    if _runs_as_dspark(drafter):
        return _deepspec(drafter, about) | _reduced(drafter)
    return _zlab(drafter, about) | _reduced(drafter)


def _reduced(drafter: DrafterConfig) -> Config:
    return {"draft_vocab_size": drafter.draft_vocab_size} if _is_reduced(drafter) else {}


def _runs_as_dspark(drafter: DrafterConfig) -> bool:
    return drafter.style is LayerStyle.GEMMA4 or drafter.layout is BlockLayout.NEXT_POSITION


def _vllm_problems(drafter: DrafterConfig) -> Iterator[str]:
    is_gemma4, has_heads = drafter.style is LayerStyle.GEMMA4, drafter.markov is not None
    if not is_gemma4 and not _is_unscaled(drafter):
        yield "its block embeddings are scaled; stock vLLM feeds raw ones, so train it with unscaled ones"
    if drafter.layout is BlockLayout.SAME_POSITION and (is_gemma4 or has_heads or drafter.confidence is not None):
        yield "slots that predict their own positions go with Qwen3's layers and no heads there"
    if _runs_as_dspark(drafter) and (drafter.markov is None or drafter.markov.kind is not MarkovKind.VANILLA):
        yield "DSpark needs a Markov head of kind 'vanilla' there"
    if is_gemma4 and not all(spec.values_are_keys for spec in drafter.layers):
        yield "Gemma 4 layers must all be full ones with K = V there"
    if is_gemma4 and _is_reduced(drafter):
        yield f"its vocabulary is reduced to {drafter.draft_vocab_size} tokens"
    if drafter.windows_from_anchor and _sliding(drafter) is not None:
        yield "its windows count back from the anchor; vLLM reads the speculators layout for such drafters"
    if drafter.output_multiplier != 1.0:
        yield f"its logits are multiplied by {drafter.output_multiplier:g}"


def _vllm_tables(drafter: DrafterConfig) -> Tables:
    if drafter.style is LayerStyle.GEMMA4:
        return Tables.OWN_BOTH
    return Tables.OWN_HEAD if _is_reduced(drafter) else Tables.BORROWED


# ours


def _outrider(drafter: DrafterConfig, about: About) -> Config:
    """z-lab's keys and our own beside them; Gemma 4's layers as DeepSpec spells them."""
    config = _deepspec(drafter, about) if drafter.style is LayerStyle.GEMMA4 else _zlab(drafter, about)
    is_next = drafter.layout is BlockLayout.NEXT_POSITION
    return {
        **config,
        "draft_vocab_size": drafter.draft_vocab_size,
        "sample_from_anchor": is_next,
        "num_speculative_tokens": drafter.num_speculative_tokens,
    }


def _outrider_problems(_drafter: DrafterConfig) -> Iterator[str]:
    yield from ()


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("outrider", _outrider, _outrider_problems, lambda _drafter: Tables.BORROWED, keeps_stored=True),
        Layout("z-lab", _zlab, _zlab_problems, lambda _drafter: Tables.BORROWED, takes_own_tables=False),
        Layout("deepspec", _deepspec, _deepspec_problems, lambda _drafter: Tables.OWN_BOTH),
        Layout(
            "speculators", _speculators, _speculators_problems, lambda _drafter: Tables.OWN_HEAD, takes_own_tables=False
        ),
        Layout("vllm", _vllm, _vllm_problems, _vllm_tables),
    )
}
