"""Fixtures of the model tests."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.kernels.cpu import CpuKernels, load_cpu_kernels


@pytest.fixture(scope="session")
def cpu_kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    """The set that this machine's first compiler makes."""
    try:
        return load_cpu_kernels(tmp_path_factory.mktemp("cache"))
    except ConfigError as error:
        pytest.skip(str(error))
