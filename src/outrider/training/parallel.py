"""Several processes that train one drafter, as torchrun starts them: each takes its share of every step's texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from outrider.errors import ConfigError

BUCKET_NUMBERS = 2**26  # of one exchange: 256 MiB


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; this one is `rank` of `count`. Each holds everything and draws the same numbers."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """True for the one process that speaks and writes files."""
        return self.rank == 0

    def shares(self, num_sequences: int, num_micro_batches: int) -> list[slice]:
        """This process's micro-batches of a step's sequences; ConfigError unless all are of one size."""
        num_parts = self.count * num_micro_batches
        if num_micro_batches < 1 or num_sequences % num_parts:
            raise ConfigError(
                f"batch_sequences={num_sequences} cannot be cut into {self.count} processes of {num_micro_batches} "
                "micro-batches. Choose --micro-batches and processes whose product divides it."
            )
        size = num_sequences // num_parts
        first = self.rank * num_micro_batches * size
        return [slice(first + index * size, first + (index + 1) * size) for index in range(num_micro_batches)]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace float tensors, the same shapes in every process, by their sums over all processes."""
        if self.count == 1:
            return
        for some in _buckets(tensors):
            flat = torch.cat([each.detach().float().flatten() for each in some])
            distributed.all_reduce(flat)
            for each, summed in zip(some, torch.split(flat, [each.numel() for each in some]), strict=True):
                each.detach().copy_(summed.view(each.shape))

    def any(self, flag: bool, device: torch.device) -> bool:
        """True in all processes if it is in one."""
        if self.count == 1:
            return flag
        votes = torch.tensor([float(flag)], device=device)
        distributed.all_reduce(votes)
        return bool(votes.item() > 0)


ALONE = Ranks()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that are exchanged together: small ones in one go, without a second copy of all."""
    some: list[Tensor] = []
    for each in tensors:
        if some and sum(other.numel() for other in some) + each.numel() > BUCKET_NUMBERS:
            yield some
            some = []
        some.append(each)
    yield some


@contextmanager
def launched_ranks(device: torch.device) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the processes that torchrun started, if it did; yields them and this process's own device.

    ConfigError if the environment names a number of processes and not which one this is. A process that fails leaves
    its group as it is and ends, so that torchrun ends the others.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield ALONE, device
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {count}, but {missing[0]} is not set. Start several processes with torchrun, or unset it."
        )
    rank = int(os.environ["RANK"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=count)
    yield Ranks(rank, count), device
    distributed.destroy_process_group()
