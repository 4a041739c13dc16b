"""Which optimiser takes which weights, and how fast."""

from __future__ import annotations

import dataclasses
import sys
import types
from itertools import pairwise

import pytest
import torch

from outrider.errors import ConfigError
from outrider.training.optimizers import learning_rate_factor, make_optimizers
from tests.training import tiny


def test_the_learning_rate_warms_up_and_falls_to_nothing() -> None:
    options = dataclasses.replace(tiny.OPTIMIZE, num_steps=100, warmup_fraction=0.1)
    factors = [learning_rate_factor(step, options) for step in range(101)]
    assert factors[:2] == pytest.approx([0.1, 0.2])
    assert max(factors) == pytest.approx(factors[9], abs=0.03)
    assert factors[50] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)
    assert all(later <= earlier for earlier, later in pairwise(factors[9:]))


def test_muon_takes_the_matrices_and_adamw_the_norms() -> None:
    model = tiny.trainer(tiny.dspark_recipe()).model
    muon, adamw = make_optimizers(model, dataclasses.replace(tiny.OPTIMIZE, optimizer="muon"))
    assert {p.dim() for p in muon.param_groups[0]["params"]} == {2}
    heads = {id(each) for name, each in model.named_parameters() if "_head." in name}
    taken = {id(each) for each in adamw.param_groups[0]["params"]}
    assert heads < taken, "a table of tokens is no matrix to Muon"
    assert {p.dim() for p in adamw.param_groups[0]["params"] if id(p) not in heads} == {1}
    num_taken = sum(len(one.param_groups[0]["params"]) for one in (muon, adamw))
    assert num_taken == len(list(model.parameters()))
    with pytest.raises(ConfigError, match="'sgd' is not one of adamw, adamw8bit, muon"):
        make_optimizers(model, dataclasses.replace(tiny.OPTIMIZE, optimizer="sgd"))


def test_eight_bit_states_are_the_first_librarys_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = torch.nn.Linear(2, 2), dataclasses.replace(tiny.OPTIMIZE, optimizer="adamw8bit")
    for name in ("torchao.optim", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"'adamw8bit' needs torchao or bitsandbytes\. Run: pip install torchao"):
        make_optimizers(model, options)
    found = types.ModuleType("bitsandbytes.optim")
    found.AdamW8bit = torch.optim.AdamW  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", found)
    (made,) = make_optimizers(model, options)
    assert made.defaults["lr"] == tiny.OPTIMIZE.learning_rate
    assert made.defaults["betas"] == (0.9, 0.98)
    assert made.defaults["weight_decay"] == 0.0
