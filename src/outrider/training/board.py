"""Figures for TensorBoard, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import ConfigError


class Board:
    """Writes each drafter's loss, learning rate and acceptance by slot to <folder>/<drafter>, one point a log row."""

    def __init__(self, folder: Path) -> None:
        """ConfigError if the package is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("--tensorboard needs a package. Run: pip install tensorboard") from error
        self.folder, self._make, self._writers = folder, SummaryWriter, dict[str, Any]()

    def write(self, name: str, step: int, figures: dict[str, float]) -> None:
        """Add points of one drafter."""
        if name not in self._writers:
            self._writers[name] = self._make(str(self.folder / name))
        for tag, value in figures.items():
            self._writers[name].add_scalar(tag, value, step)
        self._writers[name].flush()
