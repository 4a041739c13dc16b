"""Where the tests of Triton kernels run: natively on a GPU in bfloat16, or interpreted on the CPU in float32.

The interpreter multiplies bfloat16 as integers, so that a test of it would say nothing; on a GPU float32 products would
be rounded. `tests/conftest.py` chooses the interpreter before anything imports Triton.

The interpreter's products are the library's, which sums a row in another order at another place in the matrix; a GPU's
instruction does not. `row_by_row_products` sums like the instruction, so that equal bits can be asked for here as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.reference import TorchKernels

IS_NATIVE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_NATIVE else "cpu")
DTYPE = torch.bfloat16 if IS_NATIVE else torch.float32
TWIN = TorchKernels(DTYPE, DEVICE)
MAX_ERROR = 2**-6 if IS_NATIVE else 1e-5  # of a number's own size, or of 1 where it is smaller


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Gaussian numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ids(*numbers: int) -> Tensor:
    """int64 on the device."""
    return torch.tensor(numbers, device=DEVICE)


def assert_near(ours: Tensor, exact: Tensor) -> None:
    """Of one shape and dtype, and near."""
    assert ours.dtype == exact.dtype
    torch.testing.assert_close(ours, exact, rtol=MAX_ERROR, atol=MAX_ERROR)


@pytest.fixture
def row_by_row_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted products add one term after another to every number; nothing changes on a GPU."""
    if IS_NATIVE:
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        total = d.data
        for column, row in zip(a.data.T, b.data, strict=True):
            total = total + column[:, None] * row[None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
