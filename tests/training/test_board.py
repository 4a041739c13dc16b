"""TensorBoard gets every figure under its drafter's name, and is asked for by name where it is missing."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.training.board import Board


class Writer:
    points: list[tuple[Any, ...]] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.append((self.folder, tag, value, step))

    def flush(self) -> None:
        self.points.append((self.folder, "flushed"))


def test_points_are_written_to_a_folder_a_drafter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = Board(tmp_path)
    board.write("one", 7, {"loss/greedy": 0.5})
    board.write("one", 8, {"loss/greedy": 0.25})
    where = str(tmp_path / "one")
    flushed = (where, "flushed")
    assert Writer.points == [(where, "loss/greedy", 0.5, 7), flushed, (where, "loss/greedy", 0.25, 8), flushed]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="Run: pip install tensorboard"):
        Board(tmp_path)
