"""On-policy text: the target continues varied openings by itself, greedily and sampled; its probabilities are kept."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from outrider.tokenizer import Tokenizer
from outrider.training.capture import GridRunner
from outrider.training.config import GenerateConfig
from outrider.training.openings import Opening


class TextKind(Enum):
    """How a batch of text was decoded."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    FILTERED = "filtered"


@dataclass
class TextBatch:
    """One batch of sequences S of P tokens with what the target thought of them."""

    kind: TextKind
    token_ids: Tensor  # int32 [S, P]
    first_label: Tensor  # int32 [S]: first position the target chose in this batch's own way
    num_valid: Tensor  # int32 [S]: tokens up to and including the first end token after the opening
    candidate_ids: Tensor | None  # int32 [S, P, K]: likeliest ids for the token AT a position; None for greedy text
    candidate_probs: Tensor | None  # float16 [S, P, K]: their unfiltered probabilities at temperature 1
    taps: Tensor | None = None  # bfloat16 [S, P, taps * N] where the recipe keeps them; the last position's are zero

    def take(self, rows: Tensor | slice) -> TextBatch:
        """Some of the sequences."""
        every = (self.token_ids, self.first_label, self.num_valid, self.candidate_ids, self.candidate_probs, self.taps)
        return TextBatch(self.kind, *(None if each is None else each[rows] for each in every))  # type: ignore[arg-type]


def encode_openings(
    openings: list[Opening], tokenizer: Tokenizer, *, max_tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids int64 [S, max_tokens] (padded with 0) and lengths int64 [S]; longer openings are cut."""
    encoded = [tokenizer.encode(opening.text)[:max_tokens] for opening in openings]
    padded = torch.zeros(len(encoded), max_tokens, dtype=torch.int64)
    for row, ids in zip(padded, encoded, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return padded.to(device), torch.tensor([len(ids) for ids in encoded], device=device)


def filtered_probs(probs: Tensor, *, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Top-k then top-p of probs [S, V] -> (ids, probs) [S, top_k], not renormalised, zero where filtered."""
    top = probs.topk(top_k, dim=-1)
    share = top.values / top.values.sum(dim=-1, keepdim=True)
    before = share.cumsum(dim=-1) - share
    return top.indices, top.values.masked_fill(before >= top_p, 0.0)


def choose(probs: Tensor, *, kind: TextKind, config: GenerateConfig) -> Tensor:
    """Draw the next token of every sequence, int64 [S], from probs [S, V]; filtered text keeps its likeliest only."""
    if kind is TextKind.FILTERED:
        ids, kept = filtered_probs(probs, top_k=config.filtered_top_k, top_p=config.filtered_top_p)
        noise = torch.empty_like(kept).exponential_()
        return ids.gather(1, (kept / noise).argmax(dim=-1, keepdim=True)).squeeze(1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)


@torch.no_grad()
def generate_batch(
    runner: GridRunner,
    prompt_ids: Tensor,
    prompt_lengths: Tensor,
    *,
    kind: TextKind,
    config: GenerateConfig,
    end_token_ids: tuple[int, ...],
    tap_layers: tuple[int, ...] = (),
) -> TextBatch:
    """Continue prompts [S, max_opening_tokens] to sequence_tokens; fed token by token, they need no padding."""
    num_sequences, device = len(prompt_ids), prompt_ids.device
    prefix = torch.zeros_like(prompt_lengths)
    if kind is TextKind.GREEDY:
        longest = config.max_sampled_prefix_tokens
        prefix = torch.randint(-8, longest + 1, prompt_lengths.shape, device=device).clamp_min(0)
    first_label = prompt_lengths + prefix
    tokens = torch.zeros(num_sequences, config.sequence_tokens, dtype=torch.int64, device=device)
    tokens[:, 0] = prompt_ids[:, 0]
    keeps = kind is not TextKind.GREEDY
    shape = (num_sequences, config.sequence_tokens, config.num_soft_candidates)
    candidate_ids = torch.zeros(shape, dtype=torch.int32, device=device) if keeps else None
    candidate_probs = torch.zeros(shape, dtype=torch.float16, device=device) if keeps else None
    kept_taps: list[Tensor] = []
    last_drawn = config.max_opening_tokens + config.max_sampled_prefix_tokens  # from here no row of greedy text draws
    for position in range(config.sequence_tokens - 1):
        logits, taps = runner.step(tokens[:, position], position, tap_layers)
        if taps is not None:
            kept_taps.append(taps.to(torch.bfloat16))  # Gemma's <bos> exceeds the range of float16
        probs = None
        if kind is TextKind.GREEDY:
            chosen = logits.argmax(dim=-1)
            drawing = (position + 1 >= prompt_lengths) & (position + 1 < first_label)
            if position + 1 < last_drawn and bool(drawing.any()):
                chosen[drawing] = choose(logits[drawing].softmax(dim=-1), kind=TextKind.SAMPLED, config=config)
        else:
            probs = logits.softmax(dim=-1)
            chosen = choose(probs, kind=kind, config=config)
        if position + 1 < prompt_ids.shape[1]:
            chosen = torch.where(position + 1 < prompt_lengths, prompt_ids[:, position + 1], chosen)
        tokens[:, position + 1] = chosen
        if probs is not None and candidate_ids is not None and candidate_probs is not None:
            top = probs.topk(config.num_soft_candidates, dim=-1)
            candidate_ids[:, position + 1] = top.indices.to(torch.int32)
            candidate_probs[:, position + 1] = top.values.to(torch.float16)
    num_valid = count_valid(tokens, prompt_lengths, end_token_ids)
    if kept_taps:
        kept_taps.append(torch.zeros_like(kept_taps[-1]))
    return TextBatch(
        kind,
        tokens.to(torch.int32),
        first_label.to(torch.int32),
        num_valid,
        candidate_ids,
        candidate_probs,
        torch.stack(kept_taps, dim=1) if kept_taps else None,
    )


def count_valid(tokens: Tensor, prompt_lengths: Tensor, end_token_ids: tuple[int, ...]) -> Tensor:
    """Tokens of each sequence [S, P] up to and including the first end token after its prompt, int32 [S]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    ends = torch.isin(tokens, torch.tensor(end_token_ids, device=tokens.device))
    ends &= positions >= prompt_lengths[:, None]
    first_end = torch.where(ends, positions, tokens.shape[1]).amin(dim=1)
    return (first_end + 1).clamp_max(tokens.shape[1]).to(torch.int32)


def generate_text(
    runner: GridRunner,
    tokenizer: Tokenizer,
    config: GenerateConfig,
    *,
    source: Callable[[int, random.Random], list[Opening]],
    end_token_ids: tuple[int, ...],
    progress: Callable[[str], None],
    tap_layers: tuple[int, ...] = (),
) -> tuple[list[TextBatch], dict[str, int]]:
    """All batches of a recipe and how many openings came from each category."""
    rng = random.Random(config.seed)
    torch.manual_seed(config.seed)
    kinds = [TextKind.GREEDY] * config.num_greedy_batches + [TextKind.SAMPLED] * config.num_sampled_batches
    kinds += [TextKind.FILTERED] * config.num_filtered_batches
    openings = source(len(kinds) * config.batch_sequences, rng)
    batches: list[TextBatch] = []
    for index, kind in enumerate(kinds):
        chosen = openings[index * config.batch_sequences : (index + 1) * config.batch_sequences]
        ids, lengths = encode_openings(
            chosen, tokenizer, max_tokens=config.max_opening_tokens, device=runner.target.device
        )
        batches.append(
            generate_batch(
                runner, ids, lengths, kind=kind, config=config, end_token_ids=end_token_ids, tap_layers=tap_layers
            )
        )
        progress(f"generated batch {index + 1}/{len(kinds)} ({kind.value})")
    return batches, dict(Counter(opening.category for opening in openings))
