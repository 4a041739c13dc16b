"""A replayed pass is the pass: same bits, on new inputs, and nothing of it happens outside the kernels."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.cpu import MAX_RECORDED_ROWS, CpuKernels
from outrider.kernels.layer_cache import LayerCache
from outrider.kernels.recording import ALIGNMENT_BYTES, RECORDED_FUNCTIONS, SCRATCH_BYTES, Scratch
from outrider.weights.packed import quantize_int8

SIZE, HEAD = 64, 16


class Layer:
    """A little of everything a pass is made of, over its own cache."""

    def __init__(self, kernels: CpuKernels) -> None:
        generator = torch.Generator().manual_seed(0)
        matrices = [torch.randn(SIZE, SIZE, generator=generator) / 8 for _ in range(6)]
        self.kernels = kernels
        self.weights = [kernels.pack(quantize_int8("weight", matrix, group_size=32)) for matrix in matrices]
        self.norm, self.head_norm = torch.rand(SIZE, generator=generator), torch.rand(HEAD, generator=generator)
        self.angles = torch.rand(40, HEAD // 2, generator=generator)
        self.cos, self.sin = self.angles.cos(), self.angles.sin()
        table = torch.tensor([[-1] * 5, [7, 2, 3, 0, 5]], dtype=torch.int32)
        self.cache = LayerCache(*torch.zeros(2, 9, 4, 4, HEAD), table)
        self.recordings: dict[Hashable, Any] = {}

    def body(self, hidden: Tensor, seats: Tensor, positions: Tensor, spans: Tensor) -> list[Tensor]:
        """One layer; calls every function that can be recorded."""
        kernels, (q, k, v, gate, up, down) = self.kernels, self.weights
        normed = kernels.rms_norm(hidden, self.norm, eps=1e-6)
        queries, keys, values = (out.view(len(hidden), 4, HEAD) for out in kernels.linears(normed, (q, k, v)))
        keys = kernels.head_norm_rope(keys, self.head_norm, self.cos, self.sin, positions, eps=1e-6)
        kernels.write_cache(self.cache, keys, values, seats, positions)
        attended = kernels.attention(queries, self.cache, spans, scale=0.25)
        hidden = kernels.rms_norm_add(attended.view(len(hidden), SIZE), self.norm, hidden, eps=1e-6)
        gated = kernels.gated_linear(hidden, gate, up, activation="silu")
        gated = kernels.gated(gated, normed, activation="gelu_tanh")
        return [kernels.linear(gated, down, residual=hidden), normed]

    def inputs(self, step: int, num_rows: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of seat 1 from position 3 * step on."""
        positions = torch.arange(num_rows) + 3 * step
        spans = torch.zeros(num_rows, 5, dtype=torch.int32)
        spans[:, 0], spans[:, 2] = 1, positions + 1
        hidden = torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(step))
        return hidden, torch.ones(num_rows, dtype=torch.int64), positions, spans

    def run(self, step: int, num_rows: int = 3) -> list[Tensor]:
        """The body through `run`."""
        return self.kernels.run(self.body, self.inputs(step, num_rows), recordings=self.recordings, key="layer")


def test_replays_equal_the_calls_themselves(cpu_kernels: CpuKernels) -> None:
    recorded, plain = Layer(cpu_kernels), Layer(cpu_kernels)
    for step in range(5):
        outputs, expected = recorded.run(step), plain.body(*plain.inputs(step))
        for out, exact in zip(outputs, expected, strict=True):
            assert torch.equal(out, exact), step
    assert torch.equal(recorded.cache.keys, plain.cache.keys)
    (recording,) = recorded.recordings.values()
    assert {RECORDED_FUNCTIONS[call.function] for call in recording.calls} == set(RECORDED_FUNCTIONS)


def test_replays_follow_a_page_table_that_changes(cpu_kernels: CpuKernels) -> None:
    recorded, plain = Layer(cpu_kernels), Layer(cpu_kernels)
    for step, page in enumerate((7, 1, 1, 8)):
        for layer in (recorded, plain):
            layer.cache.table[1, 0] = page
        assert torch.equal(recorded.run(step)[0], plain.body(*plain.inputs(step))[0]), step
    assert torch.equal(recorded.cache.keys, plain.cache.keys)
    assert recorded.cache.keys[[7, 1]].flatten(1).any(dim=1).all()


def test_results_belong_to_the_caller(cpu_kernels: CpuKernels) -> None:
    layer = Layer(cpu_kernels)
    outputs = [layer.run(step)[0] for step in range(3)]
    copies = [out.clone() for out in outputs]
    layer.run(3)
    assert all(torch.equal(out, copy) for out, copy in zip(outputs, copies, strict=True))


def test_every_number_of_rows_has_its_own_and_large_passes_have_none(cpu_kernels: CpuKernels) -> None:
    layer = Layer(cpu_kernels)
    for num_rows in (1, 2, 1, MAX_RECORDED_ROWS, MAX_RECORDED_ROWS + 1):
        assert torch.equal(layer.run(0, num_rows)[0], Layer(cpu_kernels).body(*layer.inputs(0, num_rows))[0])
    assert len(layer.recordings) == 3


@pytest.mark.parametrize("operation", [lambda x: x * 2, lambda x: x.add_(1), lambda x: x.t().contiguous().t()])
def test_torch_operations_in_a_recorded_pass_are_refused(cpu_kernels: CpuKernels, operation: Any) -> None:
    layer = Layer(cpu_kernels)
    recordings: dict[Hashable, Any] = {}

    def body(hidden: Tensor) -> list[Tensor]:
        return [cpu_kernels.rms_norm(operation(hidden), layer.norm, eps=1e-6)]

    with pytest.raises(AssertionError, match="may call kernels only"):
        cpu_kernels.run(body, (torch.randn(2, SIZE),), recordings=recordings, key="bad")
    assert not recordings
    assert torch.equal(layer.run(0)[0], Layer(cpu_kernels).body(*layer.inputs(0))[0])  # nothing lingers


def test_passes_share_the_memory_of_what_they_make(cpu_kernels: CpuKernels) -> None:
    layer, plain = Layer(cpu_kernels), Layer(cpu_kernels)
    for num_rows in range(1, MAX_RECORDED_ROWS + 1):
        layer.run(0, num_rows)
    plain.body(*plain.inputs(0, MAX_RECORDED_ROWS))
    scratches = {id(recording.scratch) for recording in layer.recordings.values()}
    assert len(scratches) == 1
    assert len({recording.outputs[1].data_ptr() for recording in layer.recordings.values()}) == 1  # made first
    for num_rows in (3, MAX_RECORDED_ROWS, 1, 7):  # a replay finds another pass's numbers where its own will be
        for out, exact in zip(layer.run(1, num_rows), plain.body(*plain.inputs(1, num_rows)), strict=True):
            assert torch.equal(out, exact), num_rows


def test_scratch_grows_for_the_largest_pass_only() -> None:
    scratch, wanted = Scratch(), torch.empty(3, 5, dtype=torch.int32)
    first, second = scratch.like(wanted), scratch.like(wanted)
    assert (first.shape, first.dtype) == (wanted.shape, wanted.dtype)
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT_BYTES
    large = scratch.like(torch.empty(SCRATCH_BYTES + 1, dtype=torch.uint8))
    assert [len(piece) for piece in scratch.pieces] == [SCRATCH_BYTES, SCRATCH_BYTES + ALIGNMENT_BYTES]
    for _ in range(3):
        scratch.rewind()
        assert scratch.like(wanted).data_ptr() == first.data_ptr()
        assert scratch.like(large).data_ptr() == large.data_ptr()
    assert len(scratch.pieces) == 2
