"""Accept: how much of a draft is kept and which token the target adds. All rules are exact.

- matching (greedy acceptance and match sampling): keep drafts while each equals the target's own choice;
- rejection sampling (Leviathan et al. 2023, Chen et al. 2023): keep draft x with probability
  min(1, target_probs[x] / draft_probs[x]), then sample what is left over;
- block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding"): the same for a whole
  block, where a likely draft makes up for an unlikely one before it. Never keeps less on average, but needs the
  distribution of every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """The outcome of a cycle for Q requests."""

    num_accepted_tokens: Tensor  # int64 [Q]: draft tokens kept, the target's own not counted
    target_token_ids: Tensor  # int64 [Q]: recovered or bonus token, the next anchor


class DraftBlock(NamedTuple):
    """What a proposer offers for Q requests: K drafts each, drawn from the stored candidates and from nothing else."""

    token_ids: Tensor  # int64 [Q, K]
    candidate_ids: Tensor  # int64 [Q, K, C]; a point mass has probability 1 at its own id
    candidate_probs: Tensor  # [Q, K, C], each slot sums to 1 over different ids
    confidences: Tensor | None = None  # [Q, K], a draft's chance to be accepted after those before it, if anyone knows
    lengths: tuple[int, ...] | None = None  # drafts of each request that count; None counts all

    def of(self, request: int, num_drafts: int) -> DraftBlock:
        """The first drafts of one request, as a block of one."""
        kept = slice(request, request + 1), slice(num_drafts)
        return DraftBlock(self.token_ids[kept], self.candidate_ids[kept], self.candidate_probs[kept])


def point_mass_block(token_ids: Tensor, dtype: torch.dtype) -> DraftBlock:
    """Deterministic drafts int64 [Q, K]: each was proposed with probability 1."""
    candidate_ids = token_ids[..., None]
    return DraftBlock(token_ids, candidate_ids, torch.ones_like(candidate_ids, dtype=dtype))


def count_leading(kept: Tensor, draft_lengths: Tensor) -> Tensor:
    """How many of the first draft_lengths [Q] slots of kept, bool [Q, K], hold before the first that does not."""
    slots = torch.arange(kept.shape[1], device=kept.device)
    return (kept & (slots < draft_lengths[:, None])).to(torch.int64).cumprod(dim=1).sum(dim=1)


def accept_matching(
    draft_token_ids: Tensor, chosen_token_ids: Tensor, draft_lengths: Tensor, *, planned_counts: Tensor | None = None
) -> Verdict:
    """Keep drafts int64 [Q, K] while they equal what the target chose in each row, int64 [Q, K + 1].

    Under synthetic acceptance `planned_counts` int64 [Q] are kept instead, where they are not negative.
    """
    num_accepted = count_leading(draft_token_ids == chosen_token_ids[:, :-1], draft_lengths)
    if planned_counts is not None:
        num_accepted = torch.where(planned_counts < 0, num_accepted, torch.minimum(planned_counts, draft_lengths))
    return Verdict(num_accepted, chosen_token_ids.gather(1, num_accepted[:, None]).squeeze(1))


def residual_probs(target_probs: Tensor, candidate_ids: Tensor, candidate_probs: Tensor) -> Tensor:
    """max(0, target - draft) for rows [Q, V] with sparse drafts [Q, C]; the target itself where nothing is left.

    Not renormalised.
    """
    leftover = _leftover(target_probs, candidate_ids, candidate_probs)
    return torch.where(leftover.sum(dim=-1, keepdim=True) > 0, leftover, target_probs)


def _leftover(target_probs: Tensor, candidate_ids: Tensor, candidate_probs: Tensor) -> Tensor:
    return target_probs.scatter_add(1, candidate_ids, -candidate_probs.to(target_probs.dtype)).clamp_min(0.0)


def draft_chance(draft: DraftBlock) -> Tensor:
    """Probability with which each draft was proposed, [Q, K]."""
    return (draft.candidate_probs * (draft.candidate_ids == draft.token_ids[..., None])).sum(dim=-1)


def accept_by_rejection(
    draft: DraftBlock, target_probs: Tensor, draft_lengths: Tensor, accept_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Rejection sampling for Q requests: (num_accepted int64 [Q], probs [Q, V] to draw the target's token from).

    The plain statement of the rule, all rows at once; the cycle uses `accept_one_by_rejection`, its sparing twin.
    target_probs [Q, K + 1, V] after filters; accept_uniforms [Q, K] in (0, 1).
    """
    target_chance = target_probs[:, :-1].gather(2, draft.token_ids[..., None]).squeeze(2)
    num_accepted = count_leading(accept_uniforms * draft_chance(draft) < target_chance, draft_lengths)
    request = torch.arange(len(num_accepted), device=num_accepted.device)
    row = target_probs[request, num_accepted]
    num_drafts = draft.token_ids.shape[1]
    if num_drafts == 0:
        return num_accepted, row
    slot = num_accepted.clamp_max(num_drafts - 1)
    residual = residual_probs(row, draft.candidate_ids[request, slot], draft.candidate_probs[request, slot])
    return num_accepted, torch.where((num_accepted < draft_lengths)[:, None], residual, row)


def accept_one_by_rejection(
    draft: DraftBlock, target_row: Callable[[int], Tensor], accept_uniforms: Tensor
) -> tuple[int, Tensor]:
    """`accept_by_rejection` for one request whose K drafts all count: (num_accepted, probs [V]).

    target_row(slot) [V] is asked for as few rows as the verdict needs: a filtered row of a large vocabulary is dear.
    """
    wanted = (accept_uniforms * draft_chance(draft)[0]).tolist()
    for slot, token_id in enumerate(draft.token_ids[0].tolist()):
        row = target_row(slot)
        if not wanted[slot] < row[token_id].item():
            residual = residual_probs(row[None], draft.candidate_ids[:, slot], draft.candidate_probs[:, slot])
            return slot, residual[0]
    return len(wanted), target_row(len(wanted))


def accept_one_by_block(
    draft: DraftBlock, target_row: Callable[[int], Tensor], accept_uniforms: Tensor
) -> tuple[int, Tensor]:
    """Block verification for one request whose K drafts all count, as `accept_one_by_rejection`.

    Sun et al. 2024, algorithm 2: weight_i = min(1, weight_(i-1) * target / draft) of draft i, and i drafts are kept if
    uniform_i < left_i / (left_i + 1 - weight_i), where left_i = sum(max(0, weight_i * target - draft)) in the row after
    them; all K with chance weight_K. The largest such i counts.
    """
    chances = draft_chance(draft)[0].tolist()
    num_kept, kept_weight, weight = 0, 1.0, 1.0
    row = target_row(0)
    kept_row = row
    for slot, token_id in enumerate(draft.token_ids[0].tolist()):
        weight = min(1.0, weight * row[token_id].item() / chances[slot])
        if weight == 0.0:
            break
        num_drafts, row = slot + 1, target_row(slot + 1)
        if accept_uniforms[slot].item() < _chance_to_keep(draft, num_drafts, row, weight):
            num_kept, kept_weight, kept_row = num_drafts, weight, row
    if num_kept == len(chances):
        return num_kept, kept_row
    candidates = draft.candidate_ids[:, num_kept], draft.candidate_probs[:, num_kept]
    return num_kept, residual_probs(kept_weight * kept_row[None], *candidates)[0]


def _chance_to_keep(draft: DraftBlock, num_drafts: int, row: Tensor, weight: float) -> float:
    """Chance to keep at least num_drafts drafts, with the target's row [V] after them."""
    if num_drafts == draft.token_ids.shape[1]:
        return weight
    leftover = _leftover(weight * row[None], draft.candidate_ids[:, num_drafts], draft.candidate_probs[:, num_drafts])
    left = leftover.sum(dtype=torch.float64).item()
    # 0 / 0 where target and draft are equal: a later draft is then kept for certain, whatever is said here.
    return 1.0 if left + 1.0 - weight == 0.0 else left / (left + 1.0 - weight)


ACCEPTANCE_RULES = {"rejection": accept_one_by_rejection, "block": accept_one_by_block}
"""How sampled requests without a seed are judged, by the name that the engine's configuration gives."""
