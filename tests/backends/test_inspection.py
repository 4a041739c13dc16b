from __future__ import annotations

from pathlib import Path

import pytest

from outrider.backends import inspection
from outrider.backends.local import make_engine
from outrider.engine.engine import EngineConfig
from outrider.errors import ConfigError, WeightsError
from outrider.weights.locate import embedded_drafter
from tests.embedded import embedded_llm


def test_kernels_of_a_cpu() -> None:
    found = inspection.inspect_kernels("torch", "cpu")
    assert found == {"kernels": "torch", "device": "cpu", "row_invariant": False}


def test_target_declares_what_it_is() -> None:
    found = inspection.inspect_target(None, progress=lambda _message: None)
    assert found["layers"] == "18 (15 sliding, 3 full)"
    assert found["vocab_size"] == 262144


def test_drafter_declares_causality_of_each_layer() -> None:
    found = inspection.inspect_drafter("auto", target=None)
    assert found["drafter"] == embedded_drafter().name
    assert all(isinstance(causal, bool) for causal in found["causal_layers"])
    assert inspection.inspect_drafter("auto", target="/some/target") == {"drafter": None}


def test_a_damaged_drafter_is_named(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((embedded_drafter() / file).read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"model\.safetensors|config\.json"):
        inspection.inspect_drafter(str(tmp_path), target="/some/target")


def test_probe_drafts_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "load", lambda *_, **__: embedded_llm())
    found = inspection.probe_drafting(None, drafter="auto", kernels="auto", device="cpu")
    assert found["same_text_as_plain"] is True
    assert found["mean_acceptance_length"] > 1.0
    assert make_engine(embedded_llm().engine.target, None, None, EngineConfig()).proposer is None


def test_a_cache_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_bytes(b"")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="Set OUTRIDER_CACHE to a directory"):
        inspection.inspect_target(None, progress=lambda _message: None)
    with pytest.raises(ConfigError, match="Set OUTRIDER_CACHE to a directory"):
        inspection.inspect_kernels("auto", "cpu")
