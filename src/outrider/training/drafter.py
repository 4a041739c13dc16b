"""The differentiable twin of `models.dflash`: many blocks of many sequences at once. One test joins the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.attention import RopeTable, rope_table
from outrider.models.config import LayerSpec
from outrider.models.drafter_config import DrafterConfig, LayerStyle
from outrider.training.heads import TrainableConfidence, TrainableMarkov

ROWS_AT_A_TIME = 512  # of attention: one mask, one call


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        return functional.rms_norm(inputs.float(), self.weight.shape, self.weight, self.eps).to(inputs.dtype)


def unit_norm(inputs: Tensor, eps: float) -> Tensor:
    """The same without a weight."""
    return functional.rms_norm(inputs.float(), inputs.shape[-1:], eps=eps).to(inputs.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [S, R, H, D] by cos and sin [S or 1, R, D/2], half-split pairs."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


class Attention(nn.Module):
    """Attention of block rows over context features and block rows."""

    def __init__(self, spec: LayerSpec, config: DrafterConfig) -> None:
        super().__init__()
        size, self.head_dim, self.scale = config.hidden_size, spec.head_dim, config.attention_scale
        kv_size, self.norms_values = spec.num_kv_heads * spec.head_dim, config.style is LayerStyle.GEMMA4
        self.q_proj = nn.Linear(size, config.num_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(size, kv_size, bias=False)
        self.v_proj = None if spec.values_are_keys else nn.Linear(size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.num_heads * spec.head_dim, size, bias=False)
        self.q_norm = RmsNorm(spec.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(spec.head_dim, config.rms_norm_eps)

    def forward(self, block: Tensor, context: Tensor, rope: BlockRope, masks: Sequence[Tensor]) -> Tensor:
        """block [S, R, N] (normed), context [S, P, N], masks of consecutive rows, bool [S, r, P + r] -> [S, R, N]."""
        queries = self.q_norm(self._heads(self.q_proj(block)))
        sources = torch.cat([context, block], dim=1)
        raw_keys = self._heads(self.k_proj(sources))
        values = raw_keys if self.v_proj is None else self._heads(self.v_proj(sources))
        if self.norms_values:
            values = unit_norm(values, self.k_norm.eps)
        queries, keys = (
            rotate(queries, rope.block_cos, rope.block_sin),
            rotate(self.k_norm(raw_keys), rope.all_cos, rope.all_sin),
        )
        groups = queries.shape[2] // keys.shape[2]
        keys, values = (each.repeat_interleave(groups, dim=2).transpose(1, 2) for each in (keys, values))
        attended, start, num_context = [], 0, context.shape[1]
        for mask in masks:
            rows = slice(start, start := start + mask.shape[1])
            seen = [slice(num_context), slice(num_context + rows.start, num_context + rows.stop)]
            attended.append(
                functional.scaled_dot_product_attention(
                    queries[:, rows].transpose(1, 2),
                    torch.cat([keys[:, :, part] for part in seen], dim=2),
                    torch.cat([values[:, :, part] for part in seen], dim=2),
                    attn_mask=mask[:, None],
                    scale=self.scale,
                )
            )
        output: Tensor = self.o_proj(torch.cat(attended, dim=2).transpose(1, 2).flatten(2))
        return output

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


class Mlp(nn.Module):
    """down(activation(gate x) * up x)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        gated = self.gate_proj(hidden)
        activated = functional.silu(gated) if self.activation == "silu" else functional.gelu(gated, approximate="tanh")
        output: Tensor = self.down_proj(activated * self.up_proj(hidden))
        return output


class DraftLayer(nn.Module):
    """One pre-norm or Gemma 4 layer; the names are those of the exported file."""

    def __init__(self, spec: LayerSpec, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = Attention(spec, config), Mlp(config)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(size, eps), RmsNorm(size, eps)
        self.is_gemma4 = config.style is LayerStyle.GEMMA4
        if self.is_gemma4:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RmsNorm(size, eps), RmsNorm(size, eps)
            self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor, context: Tensor, rope: BlockRope, masks: Sequence[Tensor]) -> Tensor:
        """hidden [S, R, N] -> [S, R, N]."""
        attended = self.self_attn(self.input_layernorm(hidden), context, rope, masks)
        if self.is_gemma4:
            hidden = hidden + self.post_attention_layernorm(attended)
            fed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
            output: Tensor = (hidden + fed) * self.layer_scalar.to(hidden.dtype)
            return output
        hidden = hidden + attended
        output = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class BlockRope:
    """cos and sin of block rows [S, R, D/2] and of context followed by block rows [S, P + R, D/2]."""

    def __init__(self, table: RopeTable, block_positions: Tensor, num_context: int) -> None:
        self.block_cos, self.block_sin = table.cos[block_positions], table.sin[block_positions]
        num_sequences = len(block_positions)
        context_cos, context_sin = (each[:num_context].expand(num_sequences, -1, -1) for each in table)
        self.all_cos = torch.cat([context_cos, self.block_cos], dim=1)
        self.all_sin = torch.cat([context_sin, self.block_sin], dim=1)


def block_mask(anchors: Tensor, *, num_context: int, block_size: int, window: int | None, is_causal: bool) -> Tensor:
    """What block rows see, bool [S, A * B, P + A * B], for anchors int64 [S, A].

    Context strictly before the block's anchor, and the block's own slots; never another block (T-069). A window counts
    positions back from the row, itself included.
    """
    num_sequences, num_anchors = anchors.shape
    device = anchors.device
    slots = torch.arange(block_size, device=device).repeat(num_anchors)  # [R]
    owner = torch.arange(num_anchors, device=device).repeat_interleave(block_size)  # [R]
    starts = anchors.repeat_interleave(block_size, dim=1)  # [S, R]
    positions = starts + slots
    context = torch.arange(num_context, device=device)
    sees_context = context < starts[:, :, None]
    same = owner[:, None] == owner[None, :]
    if window is not None:
        sees_context &= positions[:, :, None] - context < window
        same &= slots[:, None] - slots[None, :] < window
    if is_causal:
        same &= slots[None, :] <= slots[:, None]
    return torch.cat([sees_context, same.expand(num_sequences, -1, -1)], dim=2)


class TrainableDFlash(nn.Module):
    """A block drafter to be fitted, and DSpark's heads if it has them; embedding and head stay the target's, frozen."""

    def __init__(self, config: DrafterConfig, *, max_positions: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.hidden_norm, self.norm = RmsNorm(size, config.rms_norm_eps), RmsNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec, config) for spec in config.layers)
        spec = config.layers[0]  # a recipe has one rope and one shape of heads for all layers
        table = rope_table(
            spec.rope,
            head_dim=spec.head_dim,
            num_positions=max_positions + config.block_size,
            dtype=torch.float32,
            device="cpu",
        )
        self.register_buffer("cos", table.cos, persistent=False)
        self.register_buffer("sin", table.sin, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        self.markov_head = self._markov(config)
        self.confidence_head = self._confidence(config)

    @staticmethod
    def _markov(config: DrafterConfig) -> TrainableMarkov | None:
        if config.markov is None:
            return None
        is_reduced = config.draft_vocab_size < config.vocab_size
        return TrainableMarkov(
            config.markov,
            hidden_size=config.hidden_size,
            num_rows=config.draft_vocab_size + 1 if is_reduced else config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
        )

    @staticmethod
    def _confidence(config: DrafterConfig) -> TrainableConfidence | None:
        if config.confidence is None:
            return None
        rank = config.markov.rank if config.markov else 0
        return TrainableConfidence(config.confidence, hidden_size=config.hidden_size, rank=rank)

    def forward(self, taps: Tensor, anchors: Tensor, block_embeds: Tensor) -> Tensor:
        """Normed hidden states of the slots that draft, [S, A, K, N].

        taps [S, P, taps * N], anchors int64 [S, A], block_embeds [S, A, B, N]: the anchor's, then the mask token's.
        """
        num_sequences, num_anchors, block_size, _ = block_embeds.shape
        context = self.hidden_norm(self.fc(taps))
        positions = (anchors[:, :, None] + torch.arange(block_size, device=anchors.device)).flatten(1)
        assert isinstance(self.cos, Tensor)
        assert isinstance(self.sin, Tensor)
        rope = BlockRope(RopeTable(self.cos, self.sin), positions, context.shape[1])
        sights = [
            (spec.window, causal) for spec, causal in zip(self.config.layers, self.config.layer_is_causal, strict=True)
        ]
        masks = {sight: self._masks(anchors, context.shape[1], block_size, *sight) for sight in dict.fromkeys(sights)}
        hidden = block_embeds.flatten(1, 2)
        for layer, sight in zip(self.layers, sights, strict=True):
            hidden = layer(hidden, context, rope, masks[sight])
        hidden = hidden.view(num_sequences, num_anchors, block_size, -1)
        normed: Tensor = self.norm(hidden[:, :, self.config.layout.num_silent_slots :])
        return normed

    def _masks(
        self, anchors: Tensor, num_context: int, block_size: int, window: int | None, is_causal: bool
    ) -> list[Tensor]:
        """Masks of a few blocks each: blocks never see each other, so that rows of all at once would be mostly void."""
        groups = torch.split(anchors, max(1, ROWS_AT_A_TIME // block_size), dim=1)
        shared: dict[str, Any] = {"num_context": num_context, "block_size": block_size, "window": window}
        return [block_mask(group, is_causal=is_causal, **shared) for group in groups]
