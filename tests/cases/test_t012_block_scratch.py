"""T-012: rows of a draft block never reach the drafter's cache; only rows made from target features persist.

Seen red: DFlashDrafter._layer_forward also writing its fresh keys and values to the cache.
"""

from __future__ import annotations

import pytest
import torch

from tests.cases.common import one_request, snapshot, text_taps, toy_proposer
from tests.toy import TAP_LAYERS, toy_drafter, toy_target

TEXT = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12]
CONTEXT = 9


@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, None), (True, 4)])
def test_t012_only_committed_rows_persist(is_causal: bool, window: int | None) -> None:
    target = toy_target()
    proposer = toy_proposer(toy_drafter(target, is_causal=is_causal, window=window))
    taps = text_taps(target, TEXT, TAP_LAYERS)
    positions, seats = torch.arange(len(TEXT)), torch.zeros(len(TEXT), dtype=torch.int64)
    proposer.commit(taps[:CONTEXT], seats[:CONTEXT], positions[:CONTEXT])
    before = snapshot(proposer.caches)

    batch = one_request(TEXT[CONTEXT], CONTEXT, 4)
    first, second = (proposer.propose(batch, 4).token_ids for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(old, new) for old, new in zip(before, snapshot(proposer.caches), strict=True))

    proposer.commit(taps[CONTEXT:], seats[CONTEXT:], positions[CONTEXT:])
    for old, new in zip(before, snapshot(proposer.caches), strict=True):
        changed = (old != new).flatten(2).any(dim=2)[0].nonzero().flatten()
        assert changed.tolist() == [9, 10]
