"""A recipe: everything that decides how a drafter is trained, read strictly from one TOML file in `recipes/`."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import ConfigError
from outrider.models.config import LayerKind, LayerSpec, RopeSpec, TargetConfig
from outrider.models.drafter_config import (
    BlockLayout,
    ConfidenceSpec,
    DrafterConfig,
    LayerStyle,
    MarkovKind,
    MarkovSpec,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """The text that the target writes for the drafter to learn from."""

    seed: int
    sequence_tokens: int  # opening included
    batch_sequences: int
    num_greedy_batches: int
    num_sampled_batches: int  # temperature 1, nothing filtered
    num_filtered_batches: int  # temperature 1, filtered_top_k, filtered_top_p
    filtered_top_k: int
    filtered_top_p: float
    max_sampled_prefix_tokens: int  # greedy texts start with up to this many sampled tokens, for variety
    max_opening_tokens: int
    num_soft_candidates: int  # target probabilities kept a token of sampled text
    keep_taps: bool  # store the drafter's taps with the text (offline capture) instead of running the target each step


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """The drafter's architecture: DFlash's blocks or, with `sample_from_anchor`, DSpark's, and either with heads."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int  # slots, the anchor's included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    sliding_window: int  # of sliding layers; 0 where all are full
    draft_vocab_size: int
    rope_theta: float
    is_causal: bool | None = None  # inside the block; left out: sliding layers are causal, full ones are not
    full_attention_layers: tuple[int, ...] = ()  # all others are sliding
    layer_style: str = LayerStyle.PRE_NORM.value  # or "Gemma 4": sandwich norms, values are keys, all layers full
    rope_rotated: float = 1.0  # share of the pairs of a head that turn; 0.25 in Gemma 4's full layers
    sample_from_anchor: bool = False  # DSpark: the anchor's slot predicts too
    scale_block_embeddings: bool = True  # False: speculators' convention
    final_logit_softcapping: float = 0.0  # 0: none
    markov_head_type: str = MarkovKind.VANILLA.value
    markov_rank: int = 0  # 0: no such head
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    @property
    def layout(self) -> BlockLayout:
        """Which token a slot predicts."""
        return BlockLayout.NEXT_POSITION if self.sample_from_anchor else BlockLayout.SAME_POSITION

    @property
    def max_draft_length(self) -> int:
        """Drafts of a whole block."""
        return self.block_size - self.layout.num_silent_slots

    def declared(self, target: TargetConfig, *, name: str, num_speculative_tokens: int) -> DrafterConfig:
        """The same as the engine knows it; ConfigError where the values cannot go together."""
        self._check(name)
        layers = tuple(self._layer(index) for index in range(self.num_layers))
        reads_markov = self.confidence_head_with_markov
        return DrafterConfig(
            name=name,
            hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            layers=layers,
            layer_is_causal=tuple(
                spec.kind is LayerKind.SLIDING if self.is_causal is None else self.is_causal for spec in layers
            ),
            rms_norm_eps=1e-6,
            activation="gelu_tanh" if self.is_gemma4 else "silu",
            layout=self.layout,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.target_layer_ids,
            num_target_layers=len(target.layers),
            vocab_size=target.vocab_size,
            draft_vocab_size=min(self.draft_vocab_size, target.vocab_size),
            embedding_scale=None if self.scale_block_embeddings else 1.0,
            final_logit_softcapping=self.final_logit_softcapping or None,
            num_speculative_tokens=num_speculative_tokens,
            style=LayerStyle(self.layer_style),
            markov=MarkovSpec(kind=MarkovKind(self.markov_head_type), rank=self.markov_rank)
            if self.markov_rank
            else None,
            confidence=ConfidenceSpec(reads_markov=reads_markov) if self.enable_confidence_head else None,
        )

    @property
    def is_gemma4(self) -> bool:
        """Whether layers are built as Gemma 4's."""
        return self.layer_style == LayerStyle.GEMMA4.value

    def _layer(self, index: int) -> LayerSpec:
        is_full = index in self.full_attention_layers
        return LayerSpec(
            kind=LayerKind.FULL if is_full else LayerKind.SLIDING,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=None if is_full else self.sliding_window,
            rope=RopeSpec(theta=self.rope_theta, rotated=self.rope_rotated),
            values_are_keys=self.is_gemma4,
        )

    def _check(self, name: str) -> None:
        layers = range(self.num_layers)
        styles, kinds = [each.value for each in LayerStyle], [each.value for each in MarkovKind]
        problems = {
            f"full_attention_layers {list(self.full_attention_layers)} must be below num_layers={self.num_layers}": any(
                layer not in layers for layer in self.full_attention_layers
            ),
            "sliding_window must be at least 1, for some layers are sliding": self.sliding_window < 1
            and len({*self.full_attention_layers}) < self.num_layers,
            f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}": self.num_heads
            % self.num_kv_heads
            != 0,
            f"layer_style {self.layer_style!r} is not one of {styles}": self.layer_style not in styles,
            "layer_style 'Gemma 4' needs every layer among full_attention_layers": self.is_gemma4
            and {*self.full_attention_layers} != {*layers},
            f"markov_head_type {self.markov_head_type!r} is not one of {kinds}": self.markov_head_type not in kinds,
            "confidence_head_with_markov needs a markov_rank": self.confidence_head_with_markov
            and not self.markov_rank,
            f"block_size={self.block_size} leaves nothing to draft": self.max_draft_length < 1,
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        if found:
            raise ConfigError(f"recipe {name}, [drafter]: {'; '.join(found)}.")


@dataclass(frozen=True, kw_only=True)
class OptimizeConfig:
    """How it is fitted. Every loss is weighed by slot and averaged over the summed weights (`losses.py`)."""

    seed: int
    num_steps: int
    batch_sequences: int  # of a step, over all processes and micro-batches
    max_anchors: int  # blocks a sequence
    repeat_anchor_weight: float  # chance of an anchor inside a repeat, relative to one outside
    optimizer: str  # "adamw", "adamw8bit", or "muon" for the matrices with AdamW for the norms
    learning_rate: float
    warmup_fraction: float
    clip_norm: float
    position_decay: float  # slot k weighs exp(-(k - 1) / position_decay)
    cross_entropy_weight: float
    total_variation_weight: float
    distillation_weight: float  # cross-entropy against the target's whole distribution: KL, and its entropy
    probability_l1_weight: float = 0.0  # sum of |drafter's - target's probability| over the draft vocabulary
    hidden_l1_weight: float = 0.0  # mean of |drafter's - target's last normed hidden state|
    confidence_weight: float = 0.0  # binary cross-entropy of the confidence head against the overlap
    num_held_out_sequences: int
    num_short_slots: int  # most steps train a block's first drafts only, the anchor counted, ...
    full_block_every_steps: int  # ... every n-th step the whole block; 1 trains the whole block always

    @property
    def needs_teacher(self) -> bool:
        """Whether a loss compares with the target's last layer."""
        return max(self.distillation_weight, self.probability_l1_weight, self.hidden_l1_weight) > 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One drafter, from text to file."""

    name: str
    num_speculative_tokens: int
    warm_start: str = ""  # a drafter to go on from: a path, or a name on the model hub
    generate: GenerateConfig
    drafter: DrafterShape
    optimize: OptimizeConfig

    def tap_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The target layers that training reads, ascending: the drafter's, and the last where a loss needs it."""
        last = (num_target_layers - 1,) if self.optimize.needs_teacher else ()
        return tuple(sorted({*self.drafter.target_layer_ids, *last}))


def _strict(kind: type[T], table: dict[str, Any], where: str) -> T:
    known = {field.name: field.default is MISSING for field in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, is_needed in known.items() if is_needed}
    unknown, missing = sorted(set(table) - set(known)), sorted(needed - set(table))
    if unknown or missing:
        raise ConfigError(f"{where}: unknown keys {unknown}, missing keys {missing}.")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; an unknown key, or one that is missing and has no default, is an error that names it."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a recipe that can be read ({error}). See recipes/*.toml.") from error
    sections = {"generate": GenerateConfig, "drafter": DrafterShape, "optimize": OptimizeConfig}
    parts: dict[str, Any] = {
        key: _strict(kind, table.pop(key, {}), f"{path} [{key}]") for key, kind in sections.items()
    }
    return _strict(Recipe, {**table, **parts}, str(path))
