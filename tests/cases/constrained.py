"""F5 and F3 over bytes: a target that would rather write something else, and drafts given by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core import Grammar, SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.engine import Engine
from outrider.engine.grammar import Constraint, make_constraint
from outrider.engine.state import RequestState
from tests.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.scripted import FixedProposer, TableTarget, make_test_engine

VOCAB_SIZE = 264  # a few ids more than the tokenizer has
GRAMMAR = Grammar("ebnf", 'root ::= "{\\"a\\":" [0-9] "}"')
TEXT = '{"a":7}'


def make_target() -> TableTarget:
    """Prefers letters to digits, a code fence to braces, anything to the end; among digits it likes 7 best."""
    logits = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    for rank, char in enumerate("`abcdefghij"):
        logits[ord(char)] = 9.0 - 0.1 * rank
    logits[ord("7")] = 3.0
    logits[EOS] = -3.0
    return TableTarget(logits.expand(VOCAB_SIZE, -1))


def drafts_of(text: Sequence[int]) -> Callable[[CycleBatch, int], Tensor]:
    """Drafts that follow a text, an id for each position of the answer; junk after its end."""

    def choose(batch: CycleBatch, draft_length: int) -> Tensor:
        padded = [*text, *[ord("j")] * 200]
        return torch.tensor([padded[at : at + draft_length] for at in batch.host_positions])

    return choose


def make_engine(text: Sequence[int] | None = None, *, target: TableTarget | None = None, **settings: Any) -> Engine:
    """An engine whose drafts follow a text; without one it decodes plainly."""
    proposer = None if text is None else FixedProposer(choose=drafts_of(text))
    return make_test_engine(
        target or make_target(), proposer, tokenizer=byte_tokenizer(), end_token_ids=[EOS], **settings
    )


def run(
    engine: Engine, params: SamplingParams, after_step: Callable[[RequestState], None] = lambda _: None
) -> RequestState:
    """One request after a prompt of the begin token alone."""
    request = engine.add([BOS], params)
    while engine.has_work:
        engine.step()
        after_step(request)
    return request


def fresh_constraint(token_ids: Sequence[int], grammar: Grammar = GRAMMAR) -> Constraint:
    """A matcher that has read these tokens and nothing else."""
    constraint = make_constraint(SamplingParams(grammar=grammar), byte_tokenizer(), VOCAB_SIZE, [EOS])
    assert constraint is not None
    assert all(constraint.advance(token_id) for token_id in token_ids)
    return constraint


def same_state(first: Constraint, second: Constraint) -> bool:
    """Both allow the same tokens now, and after each of them."""
    if first.has_ended or second.has_ended:
        return first.has_ended == second.has_ended
    allowed = first.allows()
    if not torch.equal(allowed, second.allows()):
        return False
    for token_id in allowed.nonzero().flatten().tolist():
        after = []
        for constraint in (first, second):
            constraint.try_token(token_id)
            after.append(None if constraint.has_ended else constraint.allows())
            constraint.take_back()
        if (after[0] is None) != (after[1] is None) or (after[0] is not None and not torch.equal(*after)):
            return False
    return True
