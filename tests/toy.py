"""Toy models with random weights, and a decode without caches to compare with (cases F1, F2 and F4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.ops import Kernels
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import GivenRows, LayerCaches
from outrider.models.config import LayerKind, LayerSpec, RopeSpec, TargetConfig
from outrider.models.dflash import DFlashDrafter
from outrider.models.draft_layers import BlockRows
from outrider.models.drafter_config import (
    BlockLayout,
    ConfidenceSpec,
    DrafterConfig,
    LayerStyle,
    MarkovKind,
    MarkovSpec,
)
from outrider.models.gemma import GemmaTarget
from outrider.models.layers import AttentionWeights
from outrider.weights.loader import Checkpoint
from outrider.weights.packed import DenseWeight, PackedWeight

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_HEADS, WINDOW = 32, 64, 4, 8
MASK_TOKEN_ID = 95
TAP_LAYERS = (1, 3, 4)
CPU = torch.device("cpu")
SOURCE = Path("toy")

_SLIDING = LayerSpec(kind=LayerKind.SLIDING, num_kv_heads=2, head_dim=8, window=WINDOW, rope=RopeSpec(theta=10_000.0))
_FULL = LayerSpec(
    kind=LayerKind.FULL, num_kv_heads=1, head_dim=24, window=None, rope=RopeSpec(theta=1_000_000.0, factor=8.0)
)


def toy_target_config(vocab_size: int = 96, eos_token_ids: tuple[int, ...] = ()) -> TargetConfig:
    """F1: windows and full attention with different shapes; nothing ends a text unless asked for."""
    return TargetConfig(
        model_type="gemma3_text",
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_heads=NUM_HEADS,
        layers=(_SLIDING, _SLIDING, _SLIDING, _FULL, _SLIDING, _FULL),
        rms_norm_eps=1e-6,
        norm_offset=1.0,
        attention_scale=1.0,
        activation="gelu_tanh",
        final_logit_softcapping=5.0,
        max_positions=4096,
        eos_token_ids=eos_token_ids,
    )


def toy_checkpoint(config: TargetConfig, *, seed: int = 0) -> Checkpoint:
    """Random float64 weights of a target, spread 0.2."""
    size, tensors = config.hidden_size, _RandomTensors(seed)
    tensors.add("model.embed_tokens.weight", config.vocab_size, size)
    tensors.add("model.norm.weight", size)
    for i, spec in enumerate(config.layers):
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        tensors.add_layer(f"model.layers.{i}", spec, config, norms=norms)
    final = tensors.weights["model.norm.weight"]
    assert isinstance(final, DenseWeight)
    final.values[1::2] = -2.0 - final.values[1::2]  # factors of both signs, or a tied head repeats its input for ever
    return Checkpoint({}, tensors.weights, config.norm_offset, SOURCE, source=SOURCE, source_sha256="")


def toy_target(
    seed: int = 0,
    vocab_size: int = 96,
    context_length: int = 128,
    *,
    kernels: Kernels | None = None,
    dtype: torch.dtype = torch.float64,
    eos_token_ids: tuple[int, ...] = (),
) -> GemmaTarget:
    """F1 in float64 with plain torch kernels, unless asked for others."""
    config = toy_target_config(vocab_size, eos_token_ids)
    return GemmaTarget(
        config,
        toy_checkpoint(config, seed=seed),
        kernels=kernels or TorchKernels(dtype),
        dtype=dtype,
        device=CPU,
        context_length=context_length,
    )


def toy_drafter_config(
    *,
    block_size: int = 5,
    is_causal: bool = False,
    window: int | None = None,
    vocab_size: int = 96,
    draft_vocab_size: int | None = None,
    mask_token_id: int = MASK_TOKEN_ID,
    scale_block_embeddings: bool = True,
) -> DrafterConfig:
    """F2: two layers over the taps of layers 1, 3 and 4; `window` makes both of them sliding."""
    spec = LayerSpec(
        kind=LayerKind.FULL if window is None else LayerKind.SLIDING,
        num_kv_heads=2,
        head_dim=8,
        window=window,
        rope=RopeSpec(theta=10_000.0),
    )
    return DrafterConfig(
        name="toy-drafter",
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_heads=NUM_HEADS,
        layers=(spec, spec),
        layer_is_causal=(is_causal, is_causal),
        rms_norm_eps=1e-6,
        activation="silu",
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=TAP_LAYERS,
        num_target_layers=6,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size or vocab_size,
        layout=BlockLayout.SAME_POSITION,
        embedding_scale=None if scale_block_embeddings else 1.0,
        final_logit_softcapping=None,
        num_speculative_tokens=block_size - 1,
    )


def toy_drafter_tensors(config: DrafterConfig, *, seed: int = 1) -> dict[str, PackedWeight]:
    """Random float64 weights of a drafter; a reduced vocabulary takes every other target id."""
    size, tensors = config.hidden_size, _RandomTensors(seed)
    tensors.add("fc.weight", size, len(config.target_layer_ids) * size)
    for name in ("hidden_norm.weight", "norm.weight"):
        tensors.add(name, size)
    for i, spec in enumerate(config.layers):
        tensors.add_layer(f"layers.{i}", spec, config, norms=("input", "post_attention"))
    if config.draft_vocab_size != config.vocab_size:
        tensors.weights["d2t"] = DenseWeight("d2t", torch.arange(config.draft_vocab_size))
    return tensors.weights


def toy_drafter(
    target: GemmaTarget,
    block_size: int = 5,
    is_causal: bool = False,
    *,
    seed: int = 1,
    window: int | None = None,
    draft_vocab_size: int | None = None,
    mask_token_id: int = MASK_TOKEN_ID,
    scale_block_embeddings: bool = True,
    context_length: int = 128,
) -> DFlashDrafter:
    """F2 for a toy target, with its kernels."""
    config = toy_drafter_config(
        block_size=block_size,
        is_causal=is_causal,
        window=window,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        mask_token_id=mask_token_id,
        scale_block_embeddings=scale_block_embeddings,
    )
    tensors = toy_drafter_tensors(config, seed=seed)
    return DFlashDrafter(config, tensors, target, kernels=target.kernels, context_length=context_length, source=SOURCE)


def toy_dspark(
    target: GemmaTarget,
    *,
    kind: MarkovKind = MarkovKind.VANILLA,
    reads_markov: bool = True,
    draft_vocab_size: int | None = None,
    w1_by_draft_id: bool = False,
    layout: BlockLayout = BlockLayout.NEXT_POSITION,
    changed: Mapping[str, PackedWeight] | None = None,
) -> DFlashDrafter:
    """A drafter of two Gemma 4 layers with Markov head (rank 6) and confidence head; tensors may be `changed`."""
    rank, size = 6, HIDDEN_SIZE
    config = toy_drafter_config(draft_vocab_size=draft_vocab_size)
    spec = replace(config.layers[0], num_kv_heads=1, head_dim=16, values_are_keys=True)
    config = replace(
        config,
        style=LayerStyle.GEMMA4,
        activation="gelu_tanh",
        layers=(spec, spec),
        layout=layout,
        final_logit_softcapping=5.0,
        markov=MarkovSpec(kind=kind, rank=rank),
        confidence=ConfidenceSpec(reads_markov=reads_markov),
    )
    extra = _RandomTensors(3)
    for index in range(len(config.layers)):
        for name in ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"):
            extra.add(f"layers.{index}.{name}", size)
        extra.add(f"layers.{index}.layer_scalar", 1)
    extra.add("markov_head.markov_w2.weight", config.draft_vocab_size, rank, spread=1.0)
    if kind is not MarkovKind.VANILLA:
        name, shape = {
            MarkovKind.GATED: ("gate_proj", (rank, size + rank)),
            MarkovKind.RNN: ("joint_proj", (3 * rank, 2 * rank + size)),
        }[kind]
        extra.add(f"markov_head.{name}.weight", *shape)
        extra.add(f"markov_head.{name}.bias", shape[0])
    extra.add("confidence_head.proj.weight", 1, size + rank * reads_markov)
    extra.add("confidence_head.proj.bias", 1)
    extra.add("markov_head.markov_w1.weight", config.draft_vocab_size + 1 if w1_by_draft_id else 96, rank, spread=1.0)
    tensors = {**toy_drafter_tensors(config), **extra.weights, **(changed or {})}
    return DFlashDrafter(config, tensors, target, kernels=target.kernels, context_length=128, source=SOURCE)


def block_logits(drafter: DFlashDrafter, block: BlockRows, caches: LayerCaches) -> Tensor:
    """Base logits [requests, drafts, Vd] of a block, before any head."""
    return drafter.base_logits(drafter.hidden(block, caches))


class _RandomTensors:
    """Names and random values, drawn in a fixed order."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.weights: dict[str, PackedWeight] = {}

    def add(self, name: str, *shape: int, spread: float = 0.2) -> None:
        values = spread * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        self.weights[name] = DenseWeight(name, values)

    def add_layer(
        self, prefix: str, spec: LayerSpec, config: TargetConfig | DrafterConfig, *, norms: Sequence[str]
    ) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        shapes = {"q_proj": (q_size, size), "k_proj": (kv_size, size)}
        shapes |= {} if spec.values_are_keys else {"v_proj": (kv_size, size)}
        shapes |= {"o_proj": (size, q_size), "q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
        for name, shape in shapes.items():
            self.add(f"{prefix}.self_attn.{name}.weight", *shape)
        for name, shape in {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}.items():
            self.add(f"{prefix}.mlp.{name}.weight", *shape)
        for name in norms:
            self.add(f"{prefix}.{name}_layernorm.weight", size)


def dense_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension."""
    return inputs / (inputs.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def dense_rope(heads: Tensor, positions: Tensor, spec: RopeSpec) -> Tensor:
    """Rotate [R, H, D] as complex numbers of the pairs (i, i + D/2)."""
    half = heads.shape[-1] // 2
    angles = positions[:, None] * spec.theta ** (-torch.arange(half, dtype=torch.float64) / half) / spec.factor
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def dense_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """[R, H, D] over [S, G, D] where mask [R, S] is true -> [R, H * D]."""
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(repeats, dim=1) for each in (keys, values))
    scores = torch.einsum("rhd,shd->hrs", queries, keys) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hrs,shd->rhd", weights, values).flatten(1)


def dense_heads(inputs: Tensor, weight: Tensor, norm: Tensor, positions: Tensor, spec: LayerSpec, eps: float) -> Tensor:
    """Projected, normed and rotated queries or keys, [R, H, D]."""
    heads = (inputs @ weight.T).unflatten(-1, (-1, spec.head_dim))
    return dense_rope(dense_norm(heads, norm, eps), positions, spec.rope)


def dense_values(inputs: Tensor, attention: AttentionWeights, spec: LayerSpec) -> Tensor:
    """Projected values, [R, G, D]."""
    return (inputs @ attention.v_proj.T).unflatten(-1, (-1, spec.head_dim))


def dense_hidden(target: GemmaTarget, token_ids: Sequence[int], given: GivenRows | None = None) -> list[Tensor]:
    """Output [R, N] of every layer over one text in one pass: no cache, no kernels, an explicit mask.

    `given` has the prompt's rows, the first ones of the text.
    """
    config, eps = target.config, target.config.rms_norm_eps
    hidden = target.embedding[torch.tensor(token_ids)] * config.hidden_size**0.5
    if given is not None:
        hidden[: len(given.is_given)][given.is_given] = given.embeddings[given.is_given]
    positions, outputs = torch.arange(len(token_ids)), []
    ages = positions[:, None] - positions
    kept: list[tuple[Tensor, Tensor]] = []
    for layer in target.layers:
        spec, attention, mlp = layer.spec, layer.attention, layer.mlp
        normed = dense_norm(hidden, layer.input_norm, eps)
        if spec.cache_source is None:
            keys = dense_heads(normed, attention.k_proj, attention.k_norm, positions, spec, eps)
            kept.append((keys, dense_values(normed, attention, spec)))
        else:
            kept.append(kept[spec.cache_source])
        attended = dense_attention(
            dense_heads(normed, attention.q_proj, attention.q_norm, positions, spec, eps),
            *kept[-1],
            (ages >= 0) & (ages < (spec.window or len(token_ids))),
            scale=config.attention_scale,
        )
        hidden = hidden + dense_norm(attended @ attention.o_proj.T, layer.post_attention_norm, eps)
        normed = dense_norm(hidden, layer.pre_feedforward_norm, eps)
        gated = functional.gelu(normed @ mlp.gate_proj.T, approximate="tanh") * (normed @ mlp.up_proj.T)
        hidden = hidden + dense_norm(gated @ mlp.down_proj.T, layer.post_feedforward_norm, eps)
        outputs.append(hidden)
    return outputs


def dense_logits(target: GemmaTarget, token_ids: Sequence[int], given: GivenRows | None = None) -> Tensor:
    """Logits [R, V] of one text."""
    normed = dense_norm(dense_hidden(target, token_ids, given)[-1], target.final_norm, target.config.rms_norm_eps)
    logits, cap = normed @ target.embedding.T, target.config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def reference_greedy(
    target: GemmaTarget, prompt: Sequence[int], num_tokens: int, given: GivenRows | None = None
) -> list[int]:
    """F4: num_tokens greedy tokens after a prompt, everything computed anew for each; does not stop at EOS."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(dense_logits(target, token_ids, given)[-1].argmax()))
    return token_ids[len(prompt) :]
