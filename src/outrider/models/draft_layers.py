"""The layers of a drafter: each attends to target features and to the block, and differs in its norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.ops import Kernels
from outrider.models.config import LayerSpec
from outrider.models.drafter_config import DrafterConfig, LayerStyle
from outrider.models.layers import AttentionWeights, MlpWeights, WeightReader


@dataclass(frozen=True)
class BlockRows:
    """The rows of a draft pass: `block_rows` slots for each of `len(seats)` requests, request after request."""

    token_ids: Tensor  # int64 [requests * block_rows]: anchor, then mask
    seats: Tensor  # int64 [requests]
    starts: Tensor  # int64 [requests]: the anchor's position
    block_rows: int
    widths: Tensor | None = None  # int64 [requests]: slots that a request drafts with; the others are filler

    @property
    def positions(self) -> Tensor:
        """Absolute position of each row, int64 [requests * block_rows]."""
        offsets = torch.arange(self.block_rows, device=self.starts.device)
        return (self.starts[:, None] + offsets).view(-1)


@dataclass(frozen=True)
class Sight:
    """What decides which keys a row sees; layers that share it share spans."""

    window: int | None
    is_causal: bool
    from_anchor: bool  # a window counts back from the anchor, the same for every slot

    def spans(self, block: BlockRows) -> Tensor:
        """Spans (kernels.ops) of block rows, int32 [requests * block_rows, 5].

        A row sees context before the anchor and slots of its own block (earlier ones only where the layer is causal).
        A window counts positions back from the row, itself included, over context and block alike; or, from the
        anchor, so many positions of context, and then the block is seen whatever the window. Filler is seen by filler
        alone, so that a request's drafts do not depend on how many slots another one has.
        """
        rows, window = block.block_rows, self.window
        device = block.starts.device
        slots = torch.arange(rows, device=device).expand(len(block.starts), rows)
        starts = block.starts[:, None].expand_as(slots)
        first_row = torch.arange(len(block.starts), device=device)[:, None] * rows
        if window is None:
            oldest = torch.zeros_like(starts)
        else:
            oldest = ((starts if self.from_anchor else starts + slots + 1) - window).clamp_min(0)
        context_start = torch.minimum(oldest, starts)
        fresh_start = first_row + (oldest - starts).clamp_min(0)
        own = torch.full_like(slots, rows) if block.widths is None else torch.maximum(block.widths[:, None], slots + 1)
        fresh_end = first_row + (slots + 1 if self.is_causal else own)
        seats = block.seats[:, None].expand_as(slots)
        columns = [seats, context_start, starts, fresh_start, fresh_end]
        return torch.stack(columns, dim=-1).view(-1, 5).to(torch.int32)


@dataclass(frozen=True)
class DraftLayer:
    """One pre-norm layer, as Qwen3's."""

    spec: LayerSpec
    sight: Sight
    attention: AttentionWeights
    mlp: MlpWeights
    input_norm: Tensor
    post_attention_norm: Tensor  # before the MLP

    def after_attention(
        self, attended: Tensor, hidden: Tensor, *, kernels: Kernels, activation: str, eps: float
    ) -> Tensor:
        """Attention result [R, H, D] and the layer's input [R, N] -> its output [R, N]."""
        hidden = self.attention.output(attended, kernels=kernels, residual=hidden)
        normed = kernels.rms_norm(hidden, self.post_attention_norm, eps=eps)
        return self.mlp.forward(normed, kernels=kernels, activation=activation, residual=hidden)


@dataclass(frozen=True)
class Gemma4DraftLayer(DraftLayer):
    """One Gemma 4 layer: post_attention_norm is over what attention adds, and the MLP has two norms of its own."""

    pre_feedforward_norm: Tensor
    post_feedforward_norm: Tensor
    scalar: float  # multiplies the layer's output

    def after_attention(
        self, attended: Tensor, hidden: Tensor, *, kernels: Kernels, activation: str, eps: float
    ) -> Tensor:
        """Attention result [R, H, D] and the layer's input [R, N] -> its output [R, N]."""
        mixed = self.attention.output(attended, kernels=kernels)
        hidden, normed = kernels.rms_norm_add_norm(
            mixed, self.post_attention_norm, hidden, self.pre_feedforward_norm, eps=eps
        )
        fed = self.mlp.forward(normed, kernels=kernels, activation=activation)
        return kernels.rms_norm_add(fed, self.post_feedforward_norm, hidden, eps=eps, scale=self.scalar)


def read_layer(reader: WeightReader, index: int, config: DrafterConfig) -> DraftLayer:
    """Claim every tensor of layer `index`."""
    spec, prefix, size = config.layers[index], f"layers.{index}", config.hidden_size
    is_gemma4 = config.style is LayerStyle.GEMMA4
    layer = DraftLayer(
        spec=spec,
        sight=Sight(spec.window, config.layer_is_causal[index], config.windows_from_anchor),
        attention=AttentionWeights.read(
            reader,
            f"{prefix}.self_attn",
            spec,
            hidden_size=size,
            num_heads=config.num_heads,
            norms_values=is_gemma4,
        ),
        mlp=MlpWeights.read(reader, f"{prefix}.mlp", hidden_size=size, intermediate_size=config.intermediate_size),
        input_norm=reader.norm(f"{prefix}.input_layernorm.weight", size),
        post_attention_norm=reader.norm(f"{prefix}.post_attention_layernorm.weight", size),
    )
    if not is_gemma4:
        return layer
    return Gemma4DraftLayer(
        **vars(layer),
        pre_feedforward_norm=reader.norm(f"{prefix}.pre_feedforward_layernorm.weight", size),
        post_feedforward_norm=reader.norm(f"{prefix}.post_feedforward_layernorm.weight", size),
        scalar=reader.scalar(f"{prefix}.layer_scalar"),
    )
