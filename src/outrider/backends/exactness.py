"""Is greedy text the same with and without drafts? Dummy weights never draft right, so right drafts are made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.backends.dummy import Models
from outrider.backends.local import make_engine
from outrider.core import SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.rejection import DraftBlock, point_mass_block
from outrider.errors import EngineFault


class SpoiledProposer:
    """Proposes known answers, spoiled so that in turn 0, 1, … drafts of a cycle are right. Point masses.

    A request whose text is not the beginning of a known answer gets drafts that are all 0.
    """

    name = "spoiled"

    def __init__(
        self, answers: Sequence[Sequence[int]], *, max_draft_length: int, vocab_size: int, tap_layers: tuple[int, ...]
    ) -> None:
        self.answers, self.vocab_size = [tuple(answer) for answer in answers], vocab_size
        self.max_draft_length = self.default_draft_length = max_draft_length
        self.tap_layers = tap_layers
        self.num_cycles = 0

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        """The next tokens of each answer, the first one past the cycle's count changed."""
        num_right = self.num_cycles % (self.max_draft_length + 1)
        self.num_cycles += 1
        drafts = [self._drafts(tuple(output), draft_length, num_right) for output in batch.outputs]
        token_ids = torch.tensor(drafts, dtype=torch.int64, device=batch.seats.device)
        return point_mass_block(token_ids, torch.float32)

    def _drafts(self, output: tuple[int, ...], draft_length: int, num_right: int) -> list[int]:
        known = next((answer for answer in self.answers if answer[: len(output)] == output), ())
        drafts = [*known[len(output) : len(output) + draft_length]]
        drafts += [0] * (draft_length - len(drafts))
        if num_right < draft_length:
            drafts[num_right] = (drafts[num_right] + 1) % self.vocab_size
        return drafts

    def commit(self, taps: Tensor, seats: Tensor, positions: Tensor) -> None:
        """Nothing is kept."""


def check_exact(
    models: Models, config: EngineConfig, prompts: Sequence[Sequence[int]], *, draft_length: int, num_tokens: int
) -> bool:
    """True if all answers equal plain decoding's, token for token: alone, with spoiled drafts, with the drafter's own.

    Prompts run together as far as `config` has seats; it must not ask for synthetic acceptance. A draft length of 0
    leaves drafts out.
    """
    plain = answer_all(make_engine(models.target, None, None, config), prompts, num_tokens)
    alone = answer_all(make_engine(models.target, None, None, config), prompts[:1], num_tokens)
    if alone != plain[:1]:
        return False
    if draft_length == 0:
        return True
    scripted = make_engine(models.target, None, None, config)
    scripted.use_proposer(
        SpoiledProposer(
            plain,
            max_draft_length=draft_length,
            vocab_size=models.target.config.vocab_size,
            tap_layers=models.drafter.config.target_layer_ids if models.drafter else (),
        )
    )
    if answer_all(scripted, prompts, num_tokens) != plain:
        return False
    if models.drafter is None:
        return True
    return answer_all(make_engine(models.target, models.drafter, None, config), prompts, num_tokens) == plain


def answer_all(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy answers of exactly so many tokens."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    if engine.drafter_fault is not None:
        raise EngineFault(f"drafting was given up, so that there is nothing to compare: {engine.drafter_fault}")
    return [list(request.output_token_ids) for request in requests]
