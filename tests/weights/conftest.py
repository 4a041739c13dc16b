"""Fixtures of the weights tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.weights.gguf_file import GgufFile, read_gguf
from outrider.weights.loader import Checkpoint, load_checkpoint
from outrider.weights.locate import locate_target
from tests.weights.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def embedded_checkpoint() -> Checkpoint:
    """The embedded default, prepared in the real cache if it is not yet."""
    return load_checkpoint(locate_target(None))


@pytest.fixture(scope="session")
def embedded_gguf() -> GgufFile:
    """The embedded default's file as it is stored."""
    return read_gguf(locate_target(None))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for one test."""
    path = tmp_path / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(path))
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A small sound GGUF file."""
    return write_tiny_gguf(tmp_path / "tiny.gguf")
