"""Recorded passes: the calls a pass makes into the compiled kernels, kept and replayed by one call.

A pass of a small model makes some two hundred calls, and what they cost the interpreter was a fifth of its time.
Addresses are recorded, so a recording lives with the caches it writes to and holds every tensor it names. What a pass
makes on its way lies in scratch memory that all recordings over the same caches share: only one of them runs at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# As `replay` in cpu.c numbers them.
RECORDED_FUNCTIONS = ("linears", "gated_linear", "rms_norm", "head_norm_rope", "write_cache", "attention", "gated")
MAX_ARGUMENTS = 15
SCRATCH_BYTES = 1 << 20  # scratch memory grows by this much, or by what one tensor needs
ALIGNMENT_BYTES = 64

Body = Callable[..., list[Tensor]]


class _Argument(ctypes.Union):
    _fields_ = (("n", c_int64), ("f", c_float), ("p", c_void_p))


class _Call(ctypes.Structure):
    _fields_ = (("function", c_int64), ("arguments", _Argument * MAX_ARGUMENTS))


class Scratch:
    """Memory for what a pass makes, as much as the largest pass needs; every recording takes it from the beginning."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self._piece, self._used_bytes = 0, 0

    def rewind(self) -> None:
        """Begin another pass, over what the last one left."""
        self._piece, self._used_bytes = 0, 0

    def like(self, tensor: Tensor) -> Tensor:
        """Uninitialised memory for a contiguous tensor of this shape and dtype."""
        num_bytes = tensor.numel() * tensor.element_size()
        reserved = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        while self._piece < len(self.pieces) and self._used_bytes + reserved > len(self.pieces[self._piece]):
            self._piece, self._used_bytes = self._piece + 1, 0
        if self._piece == len(self.pieces):
            self.pieces.append(torch.empty(max(reserved, SCRATCH_BYTES), dtype=torch.uint8))
        taken = self.pieces[self._piece][self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += reserved
        return taken.view(tensor.dtype).view(tensor.shape)


class Recording:
    """One pass for inputs of fixed shapes."""

    def __init__(self, inputs: Sequence[Tensor], scratch: Scratch) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self.scratch = scratch
        self.calls: list[_Call] = []
        self.kept: list[Any] = []  # whatever the addresses point into
        self.outputs: list[Tensor] = []
        self.packed_calls: Any = None

    def record(self, body: Body) -> list[Tensor]:
        """Run the body on this recording's own inputs; the kernels must `note` their calls meanwhile."""
        self.scratch.rewind()
        with _KernelsOnly(self.scratch):
            self.outputs = body(*self.inputs)
        self.packed_calls = (_Call * len(self.calls))(*self.calls)
        return [output.clone() for output in self.outputs]

    def note(self, function: str, arguments: Sequence[Any], types: Sequence[Any], kept: Sequence[Any]) -> None:
        """Keep one call."""
        call = _Call(RECORDED_FUNCTIONS.index(function))
        for slot, value, kind in zip(call.arguments, arguments, types, strict=False):
            if kind is c_float:
                slot.f = value
            else:
                slot.n = value or 0
        self.calls.append(call)
        self.kept.append(kept)

    def replay(self, replay: Callable[[Any, int], None], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The pass again, on new inputs of the same shapes."""
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        replay(self.packed_calls, len(self.packed_calls))
        return [output.clone() for output in self.outputs]


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses whatever a replay would leave out: every torch operation but views and allocations; these are scratch."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scratch = scratch

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        is_view = (
            not function._schema.is_mutable
            and isinstance(result, Tensor)
            and args
            and isinstance(args[0], Tensor)
            and result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        )
        if is_view:
            return result
        if name in ("aten::empty", "aten::new_empty", "aten::empty_like"):
            return self._scratch.like(result)
        raise AssertionError(f"a recorded pass may call kernels only, and this one calls {name}.")


def signature_of(inputs: Sequence[Tensor]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """What must agree for a recording to serve again."""
    return tuple((tensor.shape, tensor.dtype) for tensor in inputs)
