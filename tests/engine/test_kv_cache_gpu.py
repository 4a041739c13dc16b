"""Page tables on CUDA: the device sees what the host set before a flush, and nothing of what it set after."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.kv_cache import PageTable


@pytest.mark.gpu
def test_a_pass_sees_the_table_as_it_was_flushed() -> None:
    table = PageTable(4, 1000, "cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    seen = []
    for page in range(20):
        for _ in range(4):
            busy = busy @ busy * 1e-3  # the copy has to wait for its turn
        table.set(page % 4, page, page)
        table.flush()
        seen.append(table.tensor.clone())
    expected = torch.full((4, 1000), -1, dtype=torch.int32)
    for page, found in enumerate(seen):
        expected[page % 4, page] = page
        assert torch.equal(found.cpu(), expected)
