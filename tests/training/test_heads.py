"""Heads start so that they change nothing, and learn."""

from __future__ import annotations

import pytest
import torch

from outrider.models.drafter_config import ConfidenceSpec, MarkovKind, MarkovSpec
from outrider.training.heads import TrainableConfidence, TrainableMarkov
from tests.training import tiny

SIZE, RANK, SLOTS = 6, 4, 3


@pytest.mark.parametrize("kind", MarkovKind)
def test_a_new_head_biases_nothing_and_every_weight_of_it_is_reached(kind: MarkovKind) -> None:
    torch.manual_seed(0)
    head = TrainableMarkov(MarkovSpec(kind=kind, rank=RANK), hidden_size=SIZE, num_rows=10, draft_vocab_size=9)
    previous = torch.tensor([[1, 2, 3], [4, 5, 6]])
    latent = head(torch.randn(2, SLOTS, SIZE), head.markov_w1(previous))
    assert latent.shape == (2, SLOTS, RANK)
    assert not head.markov_w2(latent).any()
    latent.square().sum().backward()
    missing = [name for name, each in head.named_parameters() if each.grad is None and "w2" not in name]
    assert not missing


@pytest.mark.parametrize("kind", MarkovKind)
def test_a_slot_knows_its_own_token_before_and_only_a_state_brings_earlier_ones(kind: MarkovKind) -> None:
    torch.manual_seed(0)
    head = TrainableMarkov(MarkovSpec(kind=kind, rank=RANK), hidden_size=SIZE, num_rows=10, draft_vocab_size=9)
    hidden, embedded = torch.randn(1, SLOTS, SIZE), torch.randn(1, SLOTS, RANK)
    other = embedded.clone()
    other[0, 0] += 1.0
    changed = (head(hidden, embedded) != head(hidden, other)).any(dim=-1)[0].tolist()
    assert changed == [True, kind is MarkovKind.RNN, kind is MarkovKind.RNN]


@pytest.mark.parametrize("reads_markov", [True, False])
def test_confidence_reads_what_it_declares(reads_markov: bool) -> None:
    head = TrainableConfidence(ConfidenceSpec(reads_markov=reads_markov), hidden_size=SIZE, rank=RANK)
    assert head.proj.weight.shape == (1, SIZE + RANK * reads_markov)
    hidden, embedded = torch.randn(2, SIZE), torch.randn(2, RANK)
    assert torch.equal(head(hidden, embedded), head(hidden, embedded + 1.0)) is not reads_markov


def test_both_heads_learn_what_the_backbone_cannot_know() -> None:
    """The token after each token is fixed; with the backbone frozen only the Markov head can say so."""
    trainer = tiny.trainer(tiny.dspark_recipe(drafter={"draft_vocab_size": tiny.VOCAB}, optimize={"num_steps": 60}))
    text = tiny.text()
    text.token_ids = (torch.arange(20) % 6 + 7).int().repeat(4, 1)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_("_head." in name)
    with torch.no_grad():
        trainer.model.markov_head.markov_w2.weight.zero_()
        trainer.model.fc.weight.zero_()
    losses = [tiny.step(trainer, text, number=step).loss.item() for step in range(60)]
    assert losses[-1] < 0.8 * losses[0]
