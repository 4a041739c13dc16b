"""The differentiable twins of `models.dspark`: both heads for all slots at once, each knowing the text before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.models.drafter_config import ConfidenceSpec, MarkovKind, MarkovSpec


class TrainableMarkov(nn.Module):
    """A low-rank bias on a slot's logits by the token before it; the names are those of the exported file.

    A new head biases nothing (w2 is 0), so that training goes on from the backbone's own drafts.
    """

    def __init__(self, spec: MarkovSpec, *, hidden_size: int, num_rows: int, draft_vocab_size: int) -> None:
        """`num_rows` of w1: one a target token, or one a draft token and one more for all others."""
        super().__init__()
        self.kind, rank = spec.kind, spec.rank
        self.markov_w1 = nn.Embedding(num_rows, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)
        if self.kind is MarkovKind.GATED:
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif self.kind is MarkovKind.RNN:
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What w2 is given: hidden [.., K, N] of the slots, w1's rows [.., K, r] of the tokens before -> [.., K, r]."""
        if self.kind is MarkovKind.VANILLA:
            return embedded
        if self.kind is MarkovKind.GATED:
            gate: Tensor = self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid()
            return gate * embedded
        state, outputs = torch.zeros_like(embedded[..., 0, :]), []
        for slot in range(embedded.shape[-2]):
            joined = self.joint_proj(torch.cat([state, embedded[..., slot, :], hidden[..., slot, :]], dim=-1))
            gate, candidate, output = joined.chunk(3, dim=-1)
            state = gate.sigmoid() * state + (1.0 - gate.sigmoid()) * candidate.tanh()
            outputs.append(output.tanh())
        return torch.stack(outputs, dim=-2)


class TrainableConfidence(nn.Module):
    """Each draft's chance to be accepted, given that those before it were, as a logit."""

    def __init__(self, spec: ConfidenceSpec, *, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.reads_markov = spec.reads_markov
        self.proj = nn.Linear(hidden_size + (rank if spec.reads_markov else 0), 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """hidden [.., N] and w1's rows [.., r] of the tokens before -> [..], float32 whatever autocast says."""
        parts = [hidden, embedded] if self.reads_markov and embedded is not None else [hidden]
        with torch.autocast(hidden.device.type, enabled=False):
            logits: Tensor = self.proj(torch.cat([part.float() for part in parts], dim=-1)).squeeze(-1)
        return logits
