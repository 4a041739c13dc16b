"""What a layer remembers of its requests: keys and values in pages, and which page holds which positions of a seat."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerCache(NamedTuple):
    """Keys and values of one layer, [pages, page size P, G, D], and a page table int32 [S, W].

    Position p of a seat lives in slot p mod P of page table[seat, (p // P) mod W]: a ring of W * P positions. A row
    whose entry is -1 writes nothing, and nobody sees it. Layers of one group share a table; it is changed in place.

    Rollback needs no work: a rejected row is overwritten by the row that takes its position before anyone reads it,
    and the ring exceeds the window by the rows of a pass, so a rejected row never displaced one that is still visible.

    With a window no row sees more positions than that, and successive rows of a pass that share a seat are at
    successive positions.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    window: int | None = None

    @staticmethod
    def of_seats(keys: Tensor, values: Tensor) -> LayerCache:
        """A ring of C slots for each seat, [S, C, G, D]: every seat owns one page of C positions."""
        return LayerCache(keys, values, torch.arange(len(keys), dtype=torch.int32, device=keys.device)[:, None])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and the page table."""
        return self.keys, self.values, self.table

    @property
    def num_slots(self) -> int:
        """Positions a seat's ring holds."""
        return self.table.shape[1] * self.keys.shape[1]
