"""A recipe: everything that decides how a drafter is trained, read strictly from one TOML file in `recipes/`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import ConfigError

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
    """The drafter's architecture."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    sliding_window: int
    is_causal: bool
    draft_vocab_size: int
    rope_theta: float


@dataclass(frozen=True, kw_only=True)
class OptimizeConfig:
    """How it is fitted."""

    seed: int
    num_steps: int
    batch_sequences: int
    max_anchors: int  # blocks a sequence
    repeat_anchor_weight: float  # chance of an anchor inside a repeat, relative to one outside
    optimizer: str  # "adamw", or "muon" for the matrices with AdamW for the norms
    learning_rate: float
    warmup_fraction: float
    clip_norm: float
    position_decay: float  # slot k weighs exp(-(k - 1) / position_decay)
    cross_entropy_weight: float
    total_variation_weight: float
    distillation_weight: float  # cross-entropy against the target's whole distribution; needs its last layer tapped
    num_held_out_sequences: int
    num_short_slots: int  # most steps train a block's first slots only, ...
    full_block_every_steps: int  # ... every n-th step the whole block; 1 trains the whole block always


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One drafter, from text to file."""

    name: str
    num_speculative_tokens: int
    generate: GenerateConfig
    drafter: DrafterShape
    optimize: OptimizeConfig


def _strict(kind: type[T], table: dict[str, Any], where: str) -> T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    unknown, missing = sorted(set(table) - known), sorted(known - set(table))
    if unknown or missing:
        raise ConfigError(f"{where}: unknown keys {unknown}, missing keys {missing}.")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; an unknown or missing key is an error that names it."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a recipe that can be read ({error}). See recipes/*.toml.") from error
    sections = {"generate": GenerateConfig, "drafter": DrafterShape, "optimize": OptimizeConfig}
    parts: dict[str, Any] = {
        key: _strict(kind, table.pop(key, {}), f"{path} [{key}]") for key, kind in sections.items()
    }
    return _strict(Recipe, {**table, **parts}, str(path))
