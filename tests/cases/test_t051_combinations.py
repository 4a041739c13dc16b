"""T-051: what cannot work together is refused before any weight is read, by name; what can, runs as asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outrider
from outrider.backends import local
from outrider.backends.local import load, make_engine
from outrider.errors import ConfigError
from outrider.kernels.ops import select_kernels
from outrider.kernels.reference import TorchKernels
from tests.embedded import embedded_llm
from tests.scripted import FixedProposer, TableTarget, make_test_engine
from tests.toy import toy_drafter, toy_target


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kernels": "flash"}, "kernels='flash' is unknown; choose one of"),
        ({"device": "tpu"}, "device='tpu' is not known"),
        ({"device": "cuda:99"}, "device='cuda:99'.*Use"),
    ],
)
def test_t051_unknown_names_are_refused_before_weights(
    options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "load_checkpoint", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=match):
        load(**options)


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "cuda")]
)
def test_t051_compiled_kernels_are_never_swapped_in_silence(dtype: torch.dtype, device: str) -> None:
    with pytest.raises(ConfigError, match=r"kernels='cpu' run float32 on a CPU, not .*'torch'"):
        select_kernels("cpu", dtype=dtype, device=device)


@pytest.mark.parametrize(
    "settings",
    [
        {"rows_per_pass": 8, "max_seats": 2},
        {"rows_per_pass": 3, "max_seats": 1},
        {"prefill_rows": 2},
        {"num_speculative_tokens": 9},
        {"row_budget": 0},
        {"acceptance": "typical"},
    ],
    ids=str,
)
def test_t051_settings_that_clash_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        make_test_engine(TableTarget.constant([0.5, 0.5]), FixedProposer(torch.tensor([0.5, 0.5])), **settings)


def test_t051_a_drafter_that_sees_both_ways_runs_on_the_targets_kernels() -> None:
    target = toy_target()
    for is_causal, window in ((False, None), (True, 6), (False, 6)):
        drafter = toy_drafter(target, is_causal=is_causal, window=window)
        engine = make_engine(target, drafter, None, outrider.EngineConfig(context_length=64, max_seats=1))
        assert drafter.kernels is engine.target.kernels
        assert drafter.config.layer_is_causal == (is_causal, is_causal)


def test_t051_what_was_asked_for_is_what_runs() -> None:
    assert isinstance(select_kernels("torch", dtype=torch.float32, device="cpu"), TorchKernels)
    assert embedded_llm().kernels_name in ("cpu", "torch")
    assert embedded_llm().engine.config.max_seats == 2
