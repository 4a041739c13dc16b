"""From text to training blocks: which anchors a sequence offers, what each block must predict, and held-out text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.training.generate import TextBatch, TextKind

REPEAT_NGRAM = 4


def step_generator(purpose: str, *, seed: int, step: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers of one step, whatever was drawn before it: a run that resumes needs only the step."""
    # A hash, since a CPU generator sees 32 bits of its seed only: sums and shifts would collide.
    mixed = random.Random(f"{purpose} {seed} {step}").getrandbits(32)
    return torch.Generator(device=device).manual_seed(mixed)


@dataclass
class BlockBatch:
    """Blocks of one step: S sequences of P tokens, A anchors each, K' = block_size - 1 labels an anchor."""

    token_ids: Tensor  # int64 [S, P]
    anchors: Tensor  # int64 [S, A]
    label_ids: Tensor  # int64 [S, A, K']: the token at anchor + 1 + k
    label_mask: Tensor  # bool [S, A, K']
    candidate_ids: Tensor  # int64 [S, A, K', C]
    candidate_probs: Tensor  # float32 [S, A, K', C]: what the drafter should propose there; greedy text: the label, 1


class TextPool:
    """All sequences of one kind, on one device."""

    def __init__(self, batches: Sequence[TextBatch]) -> None:
        self.kind = batches[0].kind
        self.token_ids = torch.cat([batch.token_ids for batch in batches])
        self.first_label = torch.cat([batch.first_label for batch in batches])
        self.num_valid = torch.cat([batch.num_valid for batch in batches])
        ids = [batch.candidate_ids for batch in batches if batch.candidate_ids is not None]
        probs = [batch.candidate_probs for batch in batches if batch.candidate_probs is not None]
        self.candidate_ids = torch.cat(ids) if ids else None
        self.candidate_probs = torch.cat(probs) if probs else None
        taps = [batch.taps for batch in batches if batch.taps is not None]
        self.taps = torch.cat(taps) if taps else None

    def __len__(self) -> int:
        return len(self.token_ids)

    def take(self, rows: Tensor) -> TextBatch:
        """The sequences `rows`, int64 [S]."""
        every = (self.token_ids, self.first_label, self.num_valid, self.candidate_ids, self.candidate_probs, self.taps)
        return TextBatch(self.kind, *every).take(rows)


def inside_repeats(token_ids: Tensor, *, ngram: int = REPEAT_NGRAM) -> Tensor:
    """bool [S, P]: the n-gram that ends at a position already occurred before in the sequence [S, P]."""
    keys = token_ids.to(torch.int64)
    hashed = keys.clone()
    for back in range(1, ngram):
        hashed = hashed * 1_000_003 + torch.roll(keys, back, dims=1)
    hashed[:, : ngram - 1] = -1 - torch.arange(ngram - 1, device=keys.device)  # no full n-gram ends here
    same = hashed[:, :, None] == hashed[:, None, :]
    earlier = torch.ones(same.shape[1:], dtype=torch.bool, device=keys.device).tril(-1)
    return (same & earlier).any(dim=-1)


def anchor_candidates(text: TextBatch) -> Tensor:
    """bool [S, P]: positions p whose next token is supervised (DFlash: slot k predicts p + k, slot 0 is known)."""
    labels = torch.arange(1, text.token_ids.shape[1] + 1, device=text.token_ids.device)
    return (labels >= text.first_label[:, None]) & (labels < text.num_valid[:, None])


def sample_anchors(weights: Tensor, count: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw `count` = A different positions a row of weights [S, P]; a weight of zero is never drawn.

    noise [S, P] is uniform in [0, 1). Returns positions int64 [S, A] and real bool [S, A], false where a row has too
    few positions.
    """
    scores = torch.where(weights > 0, noise.clamp_min(1e-12).log() / weights.clamp_min(1e-12), -torch.inf)
    top = scores.topk(count, dim=-1)
    return top.indices, top.values > -torch.inf


def make_blocks(text: TextBatch, anchors: Tensor, real: Tensor, *, block_size: int) -> BlockBatch:
    """Labels and soft targets of the blocks at anchors [S, A]; `real` bool [S, A] marks the ones that count."""
    device, num_positions = text.token_ids.device, text.token_ids.shape[1]
    positions = anchors[:, :, None] + torch.arange(1, block_size, device=device)
    mask = real[:, :, None] & (positions < text.num_valid[:, None, None])
    positions = positions.clamp_max(num_positions - 1)
    sequence = torch.arange(len(anchors), device=device)[:, None, None]
    token_ids = text.token_ids.to(torch.int64)
    labels = token_ids[sequence, positions]
    if text.candidate_ids is None or text.candidate_probs is None:
        candidate_ids, candidate_probs = labels[..., None], torch.ones_like(labels, dtype=torch.float32)[..., None]
    else:
        candidate_ids = text.candidate_ids[sequence, positions].to(torch.int64)
        candidate_probs = text.candidate_probs[sequence, positions].to(torch.float32)
    return BlockBatch(token_ids, anchors, labels, mask, candidate_ids, candidate_probs)


class BlockDataset:
    """A training batch for every step, of one kind in proportion to the text there is, and held-out text."""

    def __init__(self, batches: Sequence[TextBatch], *, num_held_out: int, seed: int) -> None:
        kinds = [kind for kind in TextKind if any(batch.kind is kind for batch in batches)]
        self.pools = [TextPool([batch for batch in batches if batch.kind is kind]) for kind in kinds]
        self.num_held_out, self.seed = num_held_out, seed
        for pool in self.pools:
            if len(pool) <= num_held_out:
                raise ConfigError(
                    f"num_held_out_sequences={num_held_out} leaves none of {len(pool)} {pool.kind.value} texts to "
                    "train on. Generate more text or hold out less."
                )

    def held_out(self, kind: TextKind) -> TextBatch:
        """The last `num_held_out` sequences of a kind; never trained on."""
        pool = next(pool for pool in self.pools if pool.kind is kind)
        return pool.take(torch.arange(len(pool) - self.num_held_out, len(pool), device=pool.token_ids.device))

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token is a label in training text, int64 [V]."""
        counts = torch.zeros(vocab_size, dtype=torch.int64, device=self.pools[0].token_ids.device)
        for pool in self.pools:
            text = pool.take(torch.arange(len(pool) - self.num_held_out, device=pool.token_ids.device))
            labels = text.token_ids[:, 1:][anchor_candidates(text)[:, :-1]]
            counts += torch.bincount(labels.to(torch.int64), minlength=vocab_size)
        return counts

    def text(self, step: int, *, num_sequences: int) -> TextBatch:
        """Random training texts of one kind, the same whenever the step is asked for."""
        generator = step_generator("text", seed=self.seed, step=step)
        sizes = torch.tensor([float(len(pool) - self.num_held_out) for pool in self.pools])
        pool = self.pools[int(torch.multinomial(sizes, 1, generator=generator))]
        rows = torch.randint(len(pool) - self.num_held_out, (num_sequences,), generator=generator)
        return pool.take(rows.to(pool.token_ids.device))
