"""What a drafter would be worth: cycles simulated on held-out text, walking from block to block as serving does."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from outrider.training.capture import GridRunner
from outrider.training.dataset import anchor_candidates, inside_repeats, make_blocks
from outrider.training.generate import TextBatch
from outrider.training.losses import candidate_log_probs
from outrider.training.trainer import Trainer

EVAL_SEQUENCES = 8


@dataclass
class GreedyWalk:
    """Simulated greedy cycles at one draft length."""

    draft_length: int
    num_cycles: int = 0
    num_accepted_tokens: int = 0
    num_cycles_outside_repeats: int = 0
    num_accepted_outside_repeats: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a cycle is worth, the target's own included."""
        return 1.0 + self.num_accepted_tokens / max(1, self.num_cycles)

    @property
    def acceptance_outside_repeats(self) -> float:
        """The same over cycles whose anchor does not end a 4-gram that occurred before."""
        return 1.0 + self.num_accepted_outside_repeats / max(1, self.num_cycles_outside_repeats)

    def summary(self) -> dict[str, float]:
        """For the record."""
        lengths = {"mean_acceptance_length": self.mean_acceptance_length}
        return {**asdict(self), **lengths, "acceptance_outside_repeats": self.acceptance_outside_repeats}


def walk(matches: Tensor, first: Tensor, last: Tensor, repeats: Tensor, *, draft_length: int) -> GreedyWalk:
    """Jump from anchor to anchor as serving does (T-073).

    matches bool [S, P, K']: draft k of the block at p equals the text; first, last int64 [S] bound the anchors
    (inclusive, exclusive); repeats bool [S, P].
    """
    accepted = matches[..., :draft_length].long().cumprod(dim=-1).sum(dim=-1).tolist()
    result = GreedyWalk(draft_length)
    for row, (start, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        anchor = start
        while anchor + draft_length < end:  # whole blocks only, so that no cycle is cut
            count = accepted[row][anchor]
            result.num_cycles += 1
            result.num_accepted_tokens += count
            if not bool(repeats[row, anchor]):
                result.num_cycles_outside_repeats += 1
                result.num_accepted_outside_repeats += count
            anchor += count + 1
    return result


@torch.no_grad()
def evaluate_greedy(trainer: Trainer, runner: GridRunner, text: TextBatch) -> list[GreedyWalk]:
    """Simulated cycles at every draft length on held-out greedy text."""
    shape, matches = trainer.recipe.drafter, []
    num_tokens = shape.max_draft_length + 1  # the anchor and all drafts
    for token_ids in torch.split(text.token_ids.to(torch.int64), EVAL_SEQUENCES):
        anchors = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        taps = runner.taps(token_ids, shape.target_layer_ids)
        logits = trainer.draft_logits(taps, token_ids, anchors, block_size=num_tokens)
        drafts = trainer.draft_to_target[logits.argmax(dim=-1)]
        later = torch.arange(1, num_tokens, device=token_ids.device) + anchors[..., None]
        inside = later < token_ids.shape[1]
        labels = token_ids.gather(1, later.clamp_max(token_ids.shape[1] - 1).flatten(1)).view_as(drafts)
        matches.append((drafts == labels) & inside)
    joined, repeats = torch.cat(matches).cpu(), inside_repeats(text.token_ids).cpu()
    first, last = (text.first_label.long() - 1).cpu(), (text.num_valid.long() - 1).cpu()
    return [walk(joined, first, last, repeats, draft_length=n) for n in range(1, num_tokens)]


@torch.no_grad()
def evaluate_sampled(trainer: Trainer, runner: GridRunner, text: TextBatch) -> list[float]:
    """Chance that rejection sampling accepts each slot, given those before it, over all anchors of held-out text."""
    shape = trainer.recipe.drafter
    total = torch.zeros(shape.max_draft_length, device=trainer.device)
    count = torch.zeros_like(total)
    assert text.candidate_ids is not None
    assert text.candidate_probs is not None
    real = anchor_candidates(text)
    for start in range(0, len(text.token_ids), EVAL_SEQUENCES):
        rows = slice(start, start + EVAL_SEQUENCES)
        part = TextBatch(
            text.kind,
            text.token_ids[rows],
            text.first_label[rows],
            text.num_valid[rows],
            text.candidate_ids[rows],
            text.candidate_probs[rows],
        )
        anchors = torch.arange(part.token_ids.shape[1], device=trainer.device).expand_as(part.token_ids)
        batch = make_blocks(part, anchors, real[rows], block_size=shape.max_draft_length + 1)
        taps = runner.taps(batch.token_ids, shape.target_layer_ids)
        logits = trainer.draft_logits(taps, batch.token_ids, anchors, block_size=shape.max_draft_length + 1)
        draft_probs = candidate_log_probs(logits, trainer.target_to_draft[batch.candidate_ids]).exp()
        overlap = torch.minimum(draft_probs, batch.candidate_probs).sum(dim=-1)
        total += (overlap * batch.label_mask).sum(dim=(0, 1))
        count += batch.label_mask.sum(dim=(0, 1))
    return (total / count.clamp_min(1)).tolist()
