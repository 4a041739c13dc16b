"""The differentiable twin of `models.dflash`: many blocks of many sequences at once. One test joins the two."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.attention import rope_table
from outrider.models.config import RopeSpec
from outrider.training.config import DrafterShape

RMS_NORM_EPS = 1e-6


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        return functional.rms_norm(inputs.float(), self.weight.shape, self.weight, RMS_NORM_EPS).to(inputs.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [S, R, H, D] by cos and sin [S or 1, R, D/2], half-split pairs."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


class Attention(nn.Module):
    """Attention of block rows over context features and block rows."""

    def __init__(self, shape: DrafterShape, hidden_size: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = RmsNorm(shape.head_dim), RmsNorm(shape.head_dim)

    def forward(self, block: Tensor, context: Tensor, rope: BlockRope, mask: Tensor) -> Tensor:
        """block [S, R, N] (normed), context [S, P, N], mask bool [S, R, P + R] -> [S, R, N]."""
        num_sequences = len(block)
        queries = self.q_norm(self.q_proj(block).view(num_sequences, block.shape[1], -1, self.head_dim))
        sources = torch.cat([context, block], dim=1)
        keys = self.k_norm(self.k_proj(sources).view(num_sequences, sources.shape[1], -1, self.head_dim))
        values = self.v_proj(sources).view(num_sequences, sources.shape[1], -1, self.head_dim)
        queries, keys = rotate(queries, rope.block_cos, rope.block_sin), rotate(keys, rope.all_cos, rope.all_sin)
        groups = queries.shape[2] // keys.shape[2]
        attended = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.repeat_interleave(groups, dim=2).transpose(1, 2),
            values.repeat_interleave(groups, dim=2).transpose(1, 2),
            attn_mask=mask[:, None],
            scale=self.head_dim**-0.5,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class Mlp(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, shape: DrafterShape, hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class DraftLayer(nn.Module):
    """One pre-norm layer; the names are those of the exported file."""

    def __init__(self, shape: DrafterShape, hidden_size: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, hidden_size)
        self.mlp = Mlp(shape, hidden_size)
        self.input_layernorm = RmsNorm(hidden_size)
        self.post_attention_layernorm = RmsNorm(hidden_size)

    def forward(self, hidden: Tensor, context: Tensor, rope: BlockRope, mask: Tensor) -> Tensor:
        """hidden [S, R, N] -> [S, R, N]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, rope, mask)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class BlockRope:
    """cos and sin of block rows [S, R, D/2] and of context followed by block rows [S, P + R, D/2]."""

    def __init__(self, cos: Tensor, sin: Tensor, block_positions: Tensor, num_context: int) -> None:
        self.block_cos, self.block_sin = cos[block_positions], sin[block_positions]
        num_sequences = len(block_positions)
        context_cos, context_sin = (table[:num_context].expand(num_sequences, -1, -1) for table in (cos, sin))
        self.all_cos = torch.cat([context_cos, self.block_cos], dim=1)
        self.all_sin = torch.cat([context_sin, self.block_sin], dim=1)


def block_mask(anchors: Tensor, *, num_context: int, block_size: int, window: int, is_causal: bool) -> Tensor:
    """What block rows see, bool [S, A * B, P + A * B], for anchors int64 [S, A].

    Context strictly before the block's anchor, and the block's own slots; never another block (T-069).
    """
    num_sequences, num_anchors = anchors.shape
    device = anchors.device
    slots = torch.arange(block_size, device=device).repeat(num_anchors)  # [R]
    owner = torch.arange(num_anchors, device=device).repeat_interleave(block_size)  # [R]
    starts = anchors.repeat_interleave(block_size, dim=1)  # [S, R]
    positions = starts + slots
    context = torch.arange(num_context, device=device)
    sees_context = (context < starts[:, :, None]) & (positions[:, :, None] - context < window)
    same = (owner[:, None] == owner[None, :]) & (slots[:, None] - slots[None, :] < window)
    if is_causal:
        same &= slots[None, :] <= slots[:, None]
    return torch.cat([sees_context, same.expand(num_sequences, -1, -1)], dim=2)


class TrainableDFlash(nn.Module):
    """A DFlash drafter to be fitted; embedding and head rows are the target's and stay frozen."""

    def __init__(self, shape: DrafterShape, *, hidden_size: int, max_positions: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * hidden_size, hidden_size, bias=False)
        self.hidden_norm, self.norm = RmsNorm(hidden_size), RmsNorm(hidden_size)
        self.layers = nn.ModuleList(DraftLayer(shape, hidden_size) for _ in range(shape.num_layers))
        table = rope_table(
            RopeSpec(theta=shape.rope_theta),
            head_dim=shape.head_dim,
            num_positions=max_positions + shape.block_size,
            dtype=torch.float32,
            device="cpu",
        )
        self.register_buffer("cos", table.cos, persistent=False)
        self.register_buffer("sin", table.sin, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, taps: Tensor, anchors: Tensor, block_embeds: Tensor) -> Tensor:
        """Hidden states of slots 1 .. B - 1, [S, A, B - 1, N].

        taps [S, P, taps * N], anchors int64 [S, A], block_embeds (scaled) [S, A, B, N].
        """
        shape, (num_sequences, num_anchors) = self.shape, anchors.shape
        context = self.hidden_norm(self.fc(taps))
        block_size = block_embeds.shape[2]
        positions = (anchors[:, :, None] + torch.arange(block_size, device=anchors.device)).flatten(1)
        assert isinstance(self.cos, Tensor)
        assert isinstance(self.sin, Tensor)
        rope = BlockRope(self.cos, self.sin, positions, context.shape[1])
        mask = block_mask(
            anchors,
            num_context=context.shape[1],
            block_size=block_size,
            window=shape.sliding_window,
            is_causal=shape.is_causal,
        )
        hidden = block_embeds.flatten(1, 2)
        for layer in self.layers:
            hidden = layer(hidden, context, rope, mask)
        hidden = hidden.view(num_sequences, num_anchors, block_size, -1)[:, :, 1:]
        normed: Tensor = self.norm(hidden)
        return normed
