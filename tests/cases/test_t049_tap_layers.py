"""T-049: tap l is the output of decoder layer l, before the final norm, alike for engine and training.

Seen red: GemmaTarget.forward keeping the input of layer l; layers counted from 1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core import SamplingParams
from outrider.models.gemma import GemmaTarget
from outrider.training.capture import GridRunner
from tests.cases.common import text_taps, toy_proposer
from tests.scripted import make_test_engine
from tests.toy import HIDDEN_SIZE, dense_hidden, toy_drafter, toy_target

TAPS = (0, 3, 5)
TEXT = [5, 17, 80, 3, 44, 9]


def engine_taps(target: GemmaTarget, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the engine hands to its proposer for a prompt."""
    proposer = toy_proposer(toy_drafter(target))
    proposer.tap_layers = TAPS
    committed: list[Tensor] = []
    monkeypatch.setattr(proposer, "commit", lambda taps, seats, positions: committed.append(taps))
    engine = make_test_engine(target, proposer, max_seats=1)
    engine.add(TEXT, SamplingParams(max_tokens=1))
    engine.step()
    return torch.cat(committed)


def test_t049_a_tap_is_its_layers_output(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toy_target()
    feed = target._feed

    def marked(index, *args):  # type: ignore[no-untyped-def]
        hidden, normed = (each.clone() for each in feed(index, *args))
        hidden[:, 0] = 1000.0 * (1 + index)
        return hidden, normed

    monkeypatch.setattr(target, "_feed", marked)
    for taps in (
        text_taps(target, TEXT, TAPS),
        engine_taps(target, monkeypatch),
        GridRunner(target, num_sequences=1, num_positions=len(TEXT)).taps(torch.tensor([TEXT]), TAPS)[0],
    ):
        assert taps.shape == (len(TEXT), len(TAPS) * HIDDEN_SIZE)
        assert torch.equal(taps[:, ::HIDDEN_SIZE], torch.tensor([[1000.0, 4000.0, 6000.0]] * 6, dtype=torch.float64))


def test_t049_engine_and_training_see_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toy_target()
    hidden = dense_hidden(target, TEXT)
    expected = torch.cat([hidden[layer] for layer in TAPS], dim=-1)
    trained = GridRunner(target, num_sequences=1, num_positions=len(TEXT)).taps(torch.tensor([TEXT]), TAPS)[0]
    torch.testing.assert_close(engine_taps(target, monkeypatch), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-10)
