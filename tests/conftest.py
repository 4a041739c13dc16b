"""What every test shares. Needs nothing but pytest, so that `pytest -m gpu` runs on a machine with little else."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

# Triton reads this when it is first imported, by whichever test: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@functools.cache
def _missing_cuda() -> str | None:
    """Why tests marked gpu cannot run here, or None if they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked gpu, with the reason, where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None and (reason := _missing_cuda()) is not None:
        pytest.skip(reason)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `-m gpu`, leave out modules without a gpu test: what they import need not be installed there."""
    is_test_module = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    if config.option.markexpr.strip() != "gpu" or not is_test_module:
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None
