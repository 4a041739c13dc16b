"""Weights that no file holds: noise, made when a model claims a tensor, so that a full size needs no checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from outrider.weights.packed import DenseWeight, PackedWeight


class DummyWeights(Mapping[str, PackedWeight]):
    """Any tensor, in the shape it is claimed in. Empty to whoever looks: what is optional is not there.

    Matrices keep the size of what passes through them (spread 1 / sqrt(in)). Factors are about 1 in size, of both signs
    where there are several: a tied head would repeat its input for ever. Numbers depend on `source`, name and device
    type alone; on the meta device there are none.
    """

    def __init__(self, source: str, *, dtype: torch.dtype, device: torch.device) -> None:
        self.source, self.dtype, self.device = source, dtype, device
        self.claimed: dict[str, tuple[int, ...]] = {}
        """Shapes by name, of what was claimed so far."""

    def claim(self, name: str, shape: tuple[int, ...]) -> PackedWeight:
        """Noise of this shape, on the device."""
        self.claimed[name] = shape
        if self.device.type == "meta":
            return DenseWeight(name, torch.empty(shape, dtype=self.dtype, device=self.device))
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.source}/{name}".encode()))
        noise = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        return DenseWeight(name, noise.mul_(shape[-1] ** -0.5) if len(shape) > 1 else _factors(noise))

    def __getitem__(self, name: str) -> PackedWeight:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _factors(noise: Tensor) -> Tensor:
    signs = noise.sign() if len(noise) > 1 else 1.0
    return (noise * 0.1 + 1.0) * signs
