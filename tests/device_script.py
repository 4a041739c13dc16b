"""Drafts that are known to be right, or wrong in one slot, as a function of tensors, which captured cycles replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.batch import Anchors
from outrider.engine.rejection import DraftBlock, point_mass_block
from outrider.kernels.sampler import Sampling


class DeviceScript:
    """Each seat's text, prompt included; by the anchor's position one slot is spoiled, or none: all counts occur.

    Seats are given in the order of the texts where there is one for each; else drafts are wrong, and no harm.
    """

    name = "device script"
    num_candidates = 1

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        max_draft_length: int,
        vocab_size: int,
        device: torch.device | str,
        tap_layers: tuple[int, ...] = (),
    ) -> None:
        self.max_draft_length = self.default_draft_length = max_draft_length
        self.vocab_size, self.tap_layers = vocab_size, tap_layers
        self.texts = torch.zeros(len(texts), max(map(len, texts)) + 1, dtype=torch.int64)
        for seat, text in enumerate(texts):
            self.texts[seat, : len(text)] = torch.tensor(text)
        self.texts = self.texts.to(device)

    def propose(self, batch: Anchors, draft_length: int) -> DraftBlock:
        return self.propose_on_device(batch, draft_length)

    def propose_on_device(self, anchors: Anchors, draft_length: int, sampling: Sampling | None = None) -> DraftBlock:
        slots = torch.arange(draft_length, device=self.texts.device)
        places = (anchors.anchor_positions[:, None] + 1 + slots).clamp_max(self.texts.shape[1] - 1)
        drafts = self.texts[anchors.seats.clamp(0, len(self.texts) - 1)[:, None], places]
        is_spoiled = slots == (anchors.anchor_positions // 3 % (self.max_draft_length + 1))[:, None]
        return point_mass_block(torch.where(is_spoiled, (drafts + 1) % self.vocab_size, drafts), torch.float32)

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        pass
