"""Triton kernels compile for every GPU they are meant for, within its shared memory; none is run.

Every wrapper of `triton_cases` is compiled, attention's too.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.triton_compile import SHARED_LIMITS_BYTES, compile_cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
MAX_SPILLED_BYTES = 96  # of stack, a thread
# Sums of 64 lines over a head of 512 leave few registers; 32 lines would read keys twice and are slower.
MAX_SPILLED_OF_LARGE_SUMS = {"attention full": 256, "attention long": 256}
QUICK = ("product 16", "int4 product 16")


def check(architecture: int, *names: str) -> None:
    results = compile_cases(architecture, names)
    assert set(names) <= set(results), "a name that no case has"
    for name, launches in results.items():
        assert launches, f"{name} launched nothing"
        for taken in launches:
            assert taken["shared"] <= SHARED_LIMITS_BYTES[architecture], (name, taken)
            assert taken["spilled"] <= MAX_SPILLED_OF_LARGE_SUMS.get(name, MAX_SPILLED_BYTES), (name, taken)


def test_some_kernels_compile_for_hopper() -> None:
    check(90, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_LIMITS_BYTES)
def test_every_kernel_compiles(architecture: int) -> None:
    check(architecture)
