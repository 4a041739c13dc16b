"""DSpark's heads: a bias on each slot's logits by the token drafted before it, and a chance of acceptance.

Formulae: formats.md §3.1 (DeepSpec). r is the Markov rank, h the slot's normed hidden state, x the token before it:

- vanilla: bias = w2(w1[x])
- gated:   bias = w2(sigmoid(gate_proj([h; w1[x]])) * w1[x])
- rnn:     (gate, candidate, output) = joint_proj([state; w1[x]; h]); bias = w2(tanh(output));
           state = sigmoid(gate) * state + (1 - sigmoid(gate)) * tanh(candidate), from 0 at the block's start
- confidence = sigmoid(proj([h; w1[x]])), or of h alone
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.ops import Kernels
from outrider.kernels.walk import Candidates, MarkovTensors, WalkTensors
from outrider.models.drafter_config import DrafterConfig, MarkovKind, MarkovSpec
from outrider.models.layers import WeightReader


@dataclass(frozen=True)
class DenseLayer:
    """inputs @ weight^T + bias in at least float32, for the small matrices of heads."""

    weight: Tensor  # [out, in]
    bias: Tensor  # [out]

    @staticmethod
    def read(reader: WeightReader, prefix: str, out_features: int, in_features: int) -> DenseLayer:
        """Claim `<prefix>.weight` and `<prefix>.bias`."""
        weight = reader.plain(f"{prefix}.weight", (out_features, in_features))
        return DenseLayer(weight, reader.plain(f"{prefix}.bias", (out_features,)))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Parts [Q, n] that make up the inputs [Q, in] -> [Q, out]."""
        return functional.linear(
            torch.cat([part.to(self.weight.dtype) for part in inputs], dim=-1), self.weight, self.bias
        )

    def part(self, inputs: Tensor, columns: slice) -> Tensor:
        """What some columns give to the outputs, bias included, [..., n] -> [..., out]."""
        return functional.linear(inputs.to(self.weight.dtype), self.weight[:, columns], self.bias)


@dataclass(frozen=True)
class MarkovHead:
    """A low-rank bias on the logits of a slot by the token drafted before it."""

    kind: MarkovKind
    kernels: Kernels
    w1: Any  # [V, r], or [Vd + 1, r] by draft id, the last row for tokens that have none
    w2: Any  # [Vd, r]
    joint: DenseLayer | None  # gate_proj or joint_proj
    rows_by_draft_id: Tensor | None  # int64 [V]: the row of w1 of each target id, where w1 goes by draft ids

    @staticmethod
    def read(reader: WeightReader, config: DrafterConfig, draft_to_target: Tensor | None) -> MarkovHead | None:
        """Claim `markov_head.*`, if the drafter has such a head."""
        if config.markov is None:
            return None
        rank = config.markov.rank
        shapes = [(config.vocab_size, rank)]
        if draft_to_target is not None:
            shapes.append((config.draft_vocab_size + 1, rank))
        w1 = reader.claims.take("markov_head.markov_w1.weight", *shapes)
        return MarkovHead(
            kind=config.markov.kind,
            kernels=reader.kernels,
            w1=reader.kernels.pack(w1),
            w2=reader.linear("markov_head.markov_w2.weight", config.draft_vocab_size, rank),
            joint=_read_joint(reader, config.markov, config.hidden_size),
            rows_by_draft_id=_rows_of(draft_to_target, config) if w1.shape[0] != config.vocab_size else None,
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """w1's rows of target ids int64 [...], [..., r]."""
        rows = token_ids if self.rows_by_draft_id is None else self.rows_by_draft_id[token_ids]
        return self.kernels.embed(rows.reshape(-1), self.w1).view(*token_ids.shape, -1)

    def w2_rows(self, draft_ids: Tensor) -> Tensor:
        """w2's rows of draft ids int64 [...], [..., r]."""
        return self.kernels.embed(draft_ids.reshape(-1), self.w2).view(*draft_ids.shape, -1)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What one slot gives to w2, [Q, r], and the state for the next slot (None for kinds without one).

        `embedded` [Q, r] is of the token before the slot, `hidden` [Q, N] the slot's own; state is None at the start.
        """
        if self.kind is MarkovKind.VANILLA:
            return embedded, None
        assert self.joint is not None
        if self.kind is MarkovKind.GATED:
            gate = self.joint.forward(hidden, embedded).sigmoid()
            return gate.to(embedded.dtype) * embedded, None
        state = torch.zeros_like(embedded) if state is None else state
        joined = self.joint.forward(state, embedded, hidden)
        gate, candidate, output = joined.chunk(3, dim=-1)
        gate = gate.sigmoid()
        state = (gate * state + (1.0 - gate) * candidate.tanh()).to(embedded.dtype)
        return output.tanh().to(embedded.dtype), state

    def bias(self, latent: Tensor) -> Tensor:
        """The bias of every draft id, [Q, r] -> [Q, Vd]; the plain twin of `bias_of`."""
        return self.kernels.logits(latent, self.w2)

    def bias_of(self, latent: Tensor, draft_ids: Tensor) -> Tensor:
        """The bias of some draft ids int64 [Q, C], [Q, C]: reads C rows of w2 and not all of them."""
        rows = self.w2_rows(draft_ids)
        wide = torch.promote_types(rows.dtype, torch.float32)
        return (rows.to(wide) * latent.to(wide)[:, None]).sum(dim=-1)

    def tensors(self, hidden: Tensor, anchor_token_ids: Tensor, token_ids: Tensor, draft_ids: Tensor) -> MarkovTensors:
        """What a walk needs of it: hidden [Q, K, N], ids int64 [Q] of anchors and [Q, K, C] of candidates."""
        rows = self.embed(anchor_token_ids), self.embed(token_ids), self.w2_rows(draft_ids)
        if self.joint is None:
            return MarkovTensors(*rows, None, None)
        size = hidden.shape[-1]  # hidden states come first in the inputs of a gate, last in those of an rnn
        first = size if self.kind is MarkovKind.GATED else self.joint.weight.shape[1] - size
        start, end = slice(first), slice(first, None)
        of_hidden, of_others = (start, end) if self.kind is MarkovKind.GATED else (end, start)
        return MarkovTensors(*rows, self.joint.weight[:, of_others], self.joint.part(hidden, of_hidden))


def _rows_of(draft_to_target: Tensor | None, config: DrafterConfig) -> Tensor:
    """The draft id of every target id, int64 [V]; one past the last for those that have none."""
    assert draft_to_target is not None
    device, count = draft_to_target.device, config.draft_vocab_size
    rows = torch.full((config.vocab_size,), count, device=device)
    rows[draft_to_target] = torch.arange(count, device=device)
    return rows


def _read_joint(reader: WeightReader, spec: MarkovSpec, hidden_size: int) -> DenseLayer | None:
    rank = spec.rank
    if spec.kind is MarkovKind.GATED:
        return DenseLayer.read(reader, "markov_head.gate_proj", rank, hidden_size + rank)
    if spec.kind is MarkovKind.RNN:
        return DenseLayer.read(reader, "markov_head.joint_proj", 3 * rank, 2 * rank + hidden_size)
    return None


@dataclass(frozen=True)
class ConfidenceHead:
    """Each draft's chance to be accepted, given that those before it were."""

    reads_markov: bool
    proj: DenseLayer

    @staticmethod
    def read(reader: WeightReader, config: DrafterConfig) -> ConfidenceHead | None:
        """Claim `confidence_head.proj.*`, if the drafter has such a head."""
        if config.confidence is None:
            return None
        reads_markov = config.confidence.reads_markov
        width = config.hidden_size + (config.markov.rank if reads_markov and config.markov else 0)
        return ConfidenceHead(reads_markov, DenseLayer.read(reader, "confidence_head.proj", 1, width))

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """A slot's hidden state [Q, N] and the Markov embedding [Q, r] of the token before it -> chances [Q]."""
        parts = (hidden, embedded) if self.reads_markov and embedded is not None else (hidden,)
        return self.proj.forward(*parts).squeeze(-1).sigmoid()

    def parts(self, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """What is taken of a Markov embedding, [r], and what hidden states [Q, K, N] and the bias add to it, [Q, K]."""
        size = hidden.shape[-1]
        of_embedded = self.proj.weight[0, size:]
        return of_embedded if len(of_embedded) else None, self.proj.part(hidden, slice(size)).squeeze(-1)


class BlockWalk:
    """The slots of a block from left to right: each slot's likeliest ids, their logits corrected by the token before.

    Only the best base candidates of a slot are looked at: a walk over the whole vocabulary would read all of w2 for
    every slot (design §4.5). `step` is called once for each slot, in order.
    """

    def __init__(
        self,
        hidden: Tensor,  # [Q, K, N], of the slots that draft
        base_logits: Tensor,  # [Q, K, Vd]
        *,
        num_candidates: int,
        draft_to_target: Tensor | None,
        markov: MarkovHead | None,
        confidence: ConfidenceHead | None,
    ) -> None:
        top = base_logits.topk(min(num_candidates, base_logits.shape[-1]), dim=-1)  # sorted: the first is the argmax
        self.hidden, self.draft_ids, self.logits = hidden, top.indices, top.values
        self.draft_to_target, self.markov, self.confidence = draft_to_target, markov, confidence
        self.num_drafts = base_logits.shape[1]
        self._state: Tensor | None = None
        self._slot = 0

    def step(self, previous_token_ids: Tensor) -> Candidates:
        """The candidates of the next slot; previous_token_ids int64 [Q] are target ids, the anchors at first."""
        slot, self._slot = self._slot, self._slot + 1
        hidden, draft_ids, logits = self.hidden[:, slot], self.draft_ids[:, slot], self.logits[:, slot]
        embedded = None
        if self.markov is not None:
            embedded = self.markov.embed(previous_token_ids)
            latent, self._state = self.markov.step(embedded, hidden, self._state)
            logits, order = (logits + self.markov.bias_of(latent, draft_ids)).sort(dim=-1, descending=True, stable=True)
            draft_ids = draft_ids.gather(1, order)
        ids = draft_ids if self.draft_to_target is None else self.draft_to_target[draft_ids]
        chance = self.confidence.forward(hidden, embedded) if self.confidence is not None else None
        return Candidates(ids, logits, chance)

    def tensors(self, anchor_token_ids: Tensor) -> WalkTensors:
        """All slots at once, for a kernel."""
        token_ids = self.draft_ids if self.draft_to_target is None else self.draft_to_target[self.draft_ids]
        markov = None
        if self.markov is not None:
            markov = self.markov.tensors(self.hidden, anchor_token_ids, token_ids, self.draft_ids)
        confidence = (None, None) if self.confidence is None else self.confidence.parts(self.hidden)
        return WalkTensors(self.logits, token_ids, markov, *confidence)
