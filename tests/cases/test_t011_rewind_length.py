"""T-011: after a round with a drafts accepted exactly prompt + emitted - 1 positions are in the caches.

Seen red: commits of num_accepted_tokens rows without the anchor; next anchors one position early.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import dense_hidden, dense_logits, reference_greedy, toy_target

PROMPT = [5, 17, 80, 3, 44]
TARGET = toy_target()
TEXT = PROMPT + reference_greedy(TARGET, PROMPT, 16)
TAP = 3


@pytest.mark.parametrize("num_accepted", range(5))
def test_t011_second_round_starts_where_the_first_ended(num_accepted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[list[int], list[int]]] = []
    verified: list[Tensor] = []
    forward, best = TARGET.forward, TARGET.best

    def noted(rows, caches, **options):  # type: ignore[no-untyped-def]
        passes.append((rows.positions.tolist(), rows.token_ids.tolist()))
        return forward(rows, caches, **options)

    monkeypatch.setattr(TARGET, "forward", noted)
    monkeypatch.setattr(TARGET, "best", lambda hidden: verified.append(TARGET.logits(hidden)) or best(hidden))
    proposer = ScriptedProposer([TEXT], script=(num_accepted, 2), tap_layers=(TAP,))
    engine = make_test_engine(TARGET, proposer, max_seats=1)
    request = engine.add(PROMPT, SamplingParams(max_tokens=16))
    for _ in range(3):
        engine.step()

    first, second = 5, 5 + num_accepted + 1  # anchors' positions
    assert [commit.positions for commit in proposer.commits] == [
        list(range(5)),
        list(range(first, second)),
        list(range(second, second + 3)),
    ]
    assert [positions for positions, _ in passes] == [
        list(range(5)),
        list(range(first, first + 5)),
        list(range(second, second + 5)),
    ]
    assert request.anchor_position == len(PROMPT) + len(request.output_token_ids) - 1 == second + 3
    assert PROMPT + request.output_token_ids == TEXT[: second + 4]
    fed = TEXT[:second] + passes[-1][1]
    torch.testing.assert_close(verified[-1], dense_logits(TARGET, fed)[second:], rtol=0, atol=1e-10)
    taps = torch.cat([commit.taps for commit in proposer.commits])
    torch.testing.assert_close(taps, dense_hidden(TARGET, TEXT[: second + 3])[TAP], rtol=0, atol=1e-10)
