"""A drafter that follows a script, and a target that is a table (cases F3 and F5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.cache_space import CacheSpace
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.proposer import Proposer
from outrider.engine.rejection import DraftBlock, point_mass_block
from outrider.kernels.sampler import TorchSampler
from outrider.models.attention import LayerCache, Rows, allocate_caches
from outrider.models.gemma import TargetOutput
from outrider.tokenizer import Tokenizer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Asked:
    """One call of ScriptedProposer.propose."""

    seats: list[int]
    anchor_token_ids: list[int]
    anchor_positions: list[int]
    draft_length: int


@dataclass(frozen=True)
class Committed:
    """The rows of one call of ScriptedProposer.commit that became text."""

    seats: list[int]
    positions: list[int]
    taps: Tensor  # [R, taps * N]


class ScriptedProposer:
    """F3: proposes `texts[seat]`, the target's own text from position 0 (prompt included), with one slot spoiled.

    `script` is the accepted count of each round, repeated for ever: 3 proposes three right drafts and then a wrong one.
    Without a script every draft is right. Drafts past the end of a text are 0. Drafts are point masses.
    """

    name = "scripted"

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        script: Sequence[int] = (),
        max_draft_length: int = 4,
        vocab_size: int = 96,
        tap_layers: tuple[int, ...] = (1,),
    ) -> None:
        self.texts, self.script, self.vocab_size = [list(text) for text in texts], tuple(script), vocab_size
        self.max_draft_length = self.default_draft_length = max_draft_length
        self.tap_layers = tap_layers
        self.asked: list[Asked] = []
        self.commits: list[Committed] = []

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        """The texts' next tokens, the first one past the script's count changed."""
        seats, positions = batch.seats.tolist(), list(batch.host_positions)
        num_right = self.script[len(self.asked) % len(self.script)] if self.script else draft_length
        self.asked.append(Asked(seats, batch.anchor_token_ids.tolist(), positions, draft_length))
        drafts = [self._drafts(seat, at, draft_length, num_right) for seat, at in zip(seats, positions, strict=True)]
        return point_mass_block(torch.tensor(drafts, device=batch.seats.device), torch.float64)

    def _drafts(self, seat: int, anchor_position: int, draft_length: int, num_right: int) -> list[int]:
        text = self.texts[seat][anchor_position + 1 : anchor_position + 1 + draft_length]
        drafts = text + [0] * (draft_length - len(text))
        if num_right < draft_length:
            drafts[num_right] = (drafts[num_right] + 1) % self.vocab_size
        return drafts

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Note the rows that became text."""
        kept = seats >= 0
        self.commits.append(Committed(seats[kept].tolist(), positions[kept].tolist(), taps[kept].clone()))


class FixedProposer:
    """Draws drafts from the same distribution in every slot, given as [V]; `argmax_only` proposes its top token always.

    `choose` decides otherwise: it gets the batch and the draft length and returns int64 [Q, K], point masses.
    """

    name = "fixed"
    tap_layers: tuple[int, ...] = ()

    def __init__(
        self,
        probs: Tensor | None = None,
        *,
        choose: Callable[[CycleBatch, int], Tensor] | None = None,
        max_draft_length: int = 4,
        seed: int = 0,
    ) -> None:
        self.probs, self.choose = probs, choose
        self.max_draft_length = self.default_draft_length = max_draft_length
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        """Point masses of `choose`, or tokens drawn from `probs` together with all of it as candidates."""
        if self.choose is not None:
            return point_mass_block(self.choose(batch, draft_length), torch.float64)
        assert self.probs is not None
        shape = (len(batch.seats), draft_length)
        flat = torch.multinomial(self.probs, shape[0] * shape[1], replacement=True, generator=self.generator)
        candidates = torch.arange(len(self.probs)).expand(*shape, -1)
        return DraftBlock(flat.view(shape), candidates, self.probs.expand(*shape, -1))

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Nothing is kept."""


class TableTarget:
    """F5: logits float64 [V, V] looked up by last token; what it was asked is in `passes`."""

    def __init__(self, table: Tensor, *, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.table, self.dtype, self.device = table.to(torch.float64), torch.float64, CPU
        self.config: Any = SimpleNamespace(
            vocab_size=len(table), layers=(), eos_token_ids=eos_token_ids, placeholders=()
        )
        self.kernels: Any = SimpleNamespace(name="table", own_threads=nullcontext, sampler=TorchSampler())
        self.passes: list[Rows] = []

    @staticmethod
    def constant(probs: Sequence[float], **options: Any) -> TableTarget:
        """The same next-token probabilities after every token."""
        return TableTarget(torch.tensor(probs, dtype=torch.float64).log().expand(len(probs), -1), **options)

    def forward(
        self,
        rows: Rows,
        caches: Sequence[LayerCache],
        *,
        tap_layers: Sequence[int] = (),
        after_first_layers: Callable[[], None] | None = None,
    ) -> TargetOutput:
        """Hidden states are the tokens themselves, [R, 1]; taps repeat them."""
        self.passes.append(rows)
        hidden = rows.token_ids[:, None].to(self.dtype)
        return TargetOutput(hidden, hidden.repeat(1, len(tap_layers)) if tap_layers else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of the table, [R, V]."""
        return self.table[hidden[:, 0].long()]

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Their maxima and where they are, [R]."""
        largest = self.logits(hidden).max(dim=-1)
        return largest.values, largest.indices


def make_test_engine(
    target: Any,
    proposer: Proposer | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    end_token_ids: Sequence[int] = (),
    space: CacheSpace | None = None,
    **settings: Any,
) -> Engine:
    """An engine on a toy or table target; settings go to EngineConfig, with a context of 128 unless told."""
    config = EngineConfig(**{"context_length": 128, **settings})
    caches = allocate_caches(
        target.config.layers,
        num_seats=config.max_seats,
        context_length=config.context_length,
        max_rows=config.max_rows,
        dtype=target.dtype,
        device=target.device,
    )
    return Engine(target, caches, proposer, tokenizer, config, frozenset(end_token_ids), space)


def run_requests(engine: Engine, *requests: tuple[Sequence[int], SamplingParams]) -> list[list[int]]:
    """Token ids of every request, all submitted at once."""
    states = [engine.add(prompt, params) for prompt, params in requests]
    while engine.has_work:
        engine.step()
    return [list(state.output_token_ids) for state in states]
