"""One drafter, what it minimises and how it takes a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.dflash import select_rows
from outrider.models.drafter_config import check_drafter
from outrider.models.gemma import GemmaTarget
from outrider.training.capture import Taps
from outrider.training.config import Recipe
from outrider.training.dataset import (
    BlockBatch,
    anchor_candidates,
    inside_repeats,
    make_blocks,
    sample_anchors,
    step_generator,
)
from outrider.training.drafter import TrainableDFlash
from outrider.training.generate import TextBatch
from outrider.training.head_loss import Head, HeadRows, head_loss
from outrider.training.losses import BlockLoss, confidence_losses, hidden_losses, position_weights
from outrider.training.optimizers import learning_rate_factor, make_optimizers
from outrider.training.parallel import Ranks
from outrider.training.warm_start import WarmStart


def choose_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids, ascending, int64 [Vd]; ties go to the lower id."""
    if size >= len(counts):
        return torch.arange(len(counts), device=counts.device)
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


@dataclass(frozen=True)
class Drafted:
    """What the drafter makes of blocks, before any logits."""

    hidden: Tensor  # [S, A, K, N], normed
    latent: Tensor | None  # [S, A, K, r]: what the Markov head gives w2, the text's token before each slot known
    confidence: Tensor | None  # [S, A, K] logits


class Trainer:
    """A drafter, its optimiser and its share of a step. Several can share one target pass."""

    def __init__(
        self, recipe: Recipe, target: GemmaTarget, token_counts: Tensor, *, start: WarmStart | None = None
    ) -> None:
        """`token_counts` int64 [V] choose a reduced draft vocabulary, unless the drafter of `start` has its own."""
        options, shape = recipe.optimize, recipe.drafter
        torch.manual_seed(options.seed)
        self.recipe, self.target, self.device = recipe, target, target.device
        self.config = shape.declared(
            target.config, name=recipe.name, num_speculative_tokens=recipe.num_speculative_tokens
        )
        check_drafter(self.config, target.config, target_name="of this run")
        self.model = TrainableDFlash(self.config, max_positions=recipe.generate.sequence_tokens)
        self.draft_to_target = choose_vocabulary(token_counts, self.config.draft_vocab_size)
        if start is not None:
            self.draft_to_target = start.give(self.model, self.draft_to_target)
        self.model.to(target.device)
        self.target_to_draft = torch.full((target.config.vocab_size,), -1, dtype=torch.int64, device=target.device)
        self.target_to_draft[self.draft_to_target] = torch.arange(len(self.draft_to_target), device=target.device)
        self.head = Head(
            self._head_matrix(), self.config.final_logit_softcapping, target.config.final_logit_softcapping
        )
        self.optimizers = make_optimizers(self.model, options)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options))
            for optimizer in self.optimizers
        ]

    def _head_matrix(self) -> Tensor:
        """Frozen rows of the tied embedding [Vd, N], as numbers whatever kernels the target runs on."""
        table, target = self.target.embedding, self.target
        if isinstance(table, Tensor) and len(self.draft_to_target) == len(table):
            return table
        rows = select_rows(target.stored_embedding, self.draft_to_target.cpu())
        return rows.dequantize(target.dtype, target.device)

    def blocks(self, text: TextBatch, step: int, *, first_row: int = 0) -> BlockBatch:
        """Draw anchors, fewer inside repeats, and make their blocks; most steps train the first drafts only.

        `text` is a step's sequences from `first_row` on: whatever the cut, a sequence gets the same anchors.
        """
        options, num_tokens = self.recipe.optimize, self.config.max_draft_length + 1
        if step % options.full_block_every_steps:
            num_tokens = min(num_tokens, options.num_short_slots)
        weights = anchor_candidates(text).float()
        weights = torch.where(inside_repeats(text.token_ids), weights * options.repeat_anchor_weight, weights)
        generator = step_generator("anchors", seed=options.seed, step=step, device=self.device)
        rows = slice(first_row, first_row + len(weights))
        num_rows = max(options.batch_sequences, rows.stop)
        noise = torch.rand(num_rows, weights.shape[1], device=self.device, generator=generator)[rows]
        anchors, real = sample_anchors(weights, min(options.max_anchors, weights.shape[1]), noise)
        return make_blocks(text, anchors, real, block_size=num_tokens)

    def draft(self, taps: Tensor, token_ids: Tensor, anchors: Tensor, *, num_drafts: int) -> Drafted:
        """Run the drafter at anchors int64 [S, A] of texts int64 [S, P], whose own taps are [S, P, taps * N]."""
        num_slots = self.config.layout.num_slots(num_drafts)
        block = torch.full((*anchors.shape, num_slots), self.config.mask_token_id, device=self.device)
        block[:, :, 0] = token_ids.gather(1, anchors)
        scale = self.target.embedding_scale if self.config.embedding_scale is None else self.config.embedding_scale
        embeds = self.target.kernels.embed(block.flatten(), self.target.embedding, scale=scale)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.target.dtype == torch.bfloat16):
            hidden = self.model(taps, anchors, embeds.view(*block.shape, -1))
            embedded = self._markov_embeds(token_ids, anchors, num_drafts)
            latent = None
            if self.model.markov_head is not None:
                assert embedded is not None
                latent = self.model.markov_head(hidden, embedded)
            head = self.model.confidence_head
            return Drafted(hidden, latent, None if head is None else head(hidden, embedded))

    def _markov_embeds(self, token_ids: Tensor, anchors: Tensor, num_drafts: int) -> Tensor | None:
        """w1's rows of the text's tokens before each slot, [S, A, K, r]."""
        if self.model.markov_head is None:
            return None
        previous = token_ids.gather(1, _from(anchors, num_drafts, token_ids.shape[1]).flatten(1))
        if self.config.draft_vocab_size < self.config.vocab_size:
            previous = self.target_to_draft[previous]
            previous = torch.where(previous < 0, self.config.draft_vocab_size, previous)
        rows: Tensor = self.model.markov_head.markov_w1(previous)
        return rows.view(*anchors.shape, num_drafts, -1)

    def draft_logits(self, taps: Tensor, token_ids: Tensor, anchors: Tensor, *, block_size: int) -> Tensor:
        """Logits over the draft vocabulary of all drafts, [S, A, B - 1, Vd], from taps [S, P, taps * N].

        B counts the anchor and its drafts, texts are int64 [S, P]. A Markov bias is by the text's own tokens: the
        drafter's, up to its first miss.
        """
        drafted = self.draft(taps, token_ids, anchors, num_drafts=block_size - 1)
        return self.head.logits(drafted.hidden, drafted.latent, self._w2)

    @property
    def _w2(self) -> Tensor | None:
        return None if self.model.markov_head is None else self.model.markov_head.markov_w2.weight

    @torch.no_grad()
    def teacher_hidden(self, last_taps: Tensor, anchors: Tensor, *, num_drafts: int) -> Tensor:
        """The target's normed hidden states that give the tokens at anchors + 1 .., [S, A, K, N], from its last layer's
        output [S, P, N]."""
        sequence = torch.arange(len(anchors), device=self.device)[:, None, None]
        hidden = last_taps[sequence, _from(anchors, num_drafts, last_taps.shape[1])]
        norm, eps = self.target.final_norm, self.target.config.rms_norm_eps
        normed = nn.functional.rms_norm(hidden.float(), norm.shape, norm.float(), eps)
        return normed.to(self.head.matrix.dtype)

    def slot_weights(self, batch: BlockBatch) -> Tensor:
        """What each draft counts in the loss, float32 [S, A, K]: nothing where it is not supervised."""
        decay = self.recipe.optimize.position_decay
        return batch.label_mask * position_weights(batch.label_mask.shape[2], decay=decay, device=self.device)

    def loss(self, taps: Taps, batch: BlockBatch, *, total_weight: Tensor | None = None) -> BlockLoss:
        """Loss of blocks, their share of a step whose weights sum to `total_weight`; left out, they are the step."""
        options, num_drafts = self.recipe.optimize, batch.label_ids.shape[2]
        weights = self.slot_weights(batch)
        weights = weights / (weights.sum() if total_weight is None else total_weight).clamp_min(1.0)
        own = taps.of(self.config.target_layer_ids)
        drafted = self.draft(own, batch.token_ids, batch.anchors, num_drafts=num_drafts)
        teacher = None
        if options.needs_teacher:
            last = taps.of((len(self.target.config.layers) - 1,))
            teacher = self.teacher_hidden(last, batch.anchors, num_drafts=num_drafts)
        compares = max(options.distillation_weight, options.probability_l1_weight) > 0
        rows = HeadRows(
            self.target_to_draft[batch.candidate_ids].flatten(0, 2),
            batch.candidate_probs.flatten(0, 2),
            weights.flatten(),
            teacher.flatten(0, 2) if teacher is not None and compares else None,
        )
        latent = None if drafted.latent is None else drafted.latent.flatten(0, 2)
        loss, flat = head_loss(self.head, rows, options, drafted.hidden.flatten(0, 2), latent, self._w2)
        chances = flat.view(weights.shape)
        if options.hidden_l1_weight > 0 and teacher is not None:
            loss = loss + options.hidden_l1_weight * (weights * hidden_losses(drafted.hidden, teacher)).sum()
        if drafted.confidence is not None:
            known = confidence_losses(drafted.confidence, chances)
            loss = loss + options.confidence_weight * (weights * known).sum()
        mask = batch.label_mask
        return BlockLoss(loss, (chances * mask).sum(dim=(0, 1)), mask.sum(dim=(0, 1)).float())

    def accumulate(self, taps: Taps, batch: BlockBatch, *, total_weight: Tensor) -> BlockLoss:
        """Add the gradients of some of a step's blocks; returns their share of its loss."""
        result = self.loss(taps, batch, total_weight=total_weight)
        result.loss.backward()  # type: ignore[no-untyped-call]
        return BlockLoss(result.loss.detach(), result.accepted, result.counted)

    def update(self, result: BlockLoss, ranks: Ranks) -> None:
        """Take the step that the gradients of all processes ask for; `result` becomes the sum of theirs."""
        parameters = list(self.model.parameters())
        # The same in every process: without supervised text they are there and 0 (T-070).
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        ranks.add_up([*gradients, result.loss, result.accepted, result.counted])
        nn.utils.clip_grad_norm_(parameters, self.recipe.optimize.clip_norm)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        self.model.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """All that steps change: float32 weights, optimisers, schedules."""
        return {key: [part.state_dict() for part in parts] for key, parts in self._stateful().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for key, parts in self._stateful().items():
            for part, saved in zip(parts, state[key], strict=True):
                part.load_state_dict(saved)

    def _stateful(self) -> dict[str, Sequence[Any]]:
        return {"model": [self.model], "optimizers": self.optimizers, "schedules": self.schedules}


def _from(anchors: Tensor, count: int, num_positions: int) -> Tensor:
    """Positions from each anchor of int64 [S, A] on, int64 [S, A, count], the last one where a text has no more."""
    positions = anchors[:, :, None] + torch.arange(count, device=anchors.device)
    return positions.clamp_max(num_positions - 1)
