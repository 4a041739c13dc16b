"""Times the matrix products of one pass of Gemma 3 270M: `python tools/kernel_bench.py`.

Prints milliseconds (best and median of many) for several row counts, the ratio to one row, and torch float32 for one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.cpu import load_cpu_kernels
from outrider.kernels.ops import Kernels
from outrider.kernels.reference import TorchKernels
from outrider.weights.locate import cache_dir
from outrider.weights.packed import BlockInt8Weight, PackedWeight, quantize_int8

NUM_LAYERS, HIDDEN = 18, 640
LAYER_SHAPES = (
    (1024, HIDDEN),
    (256, HIDDEN),
    (256, HIDDEN),
    (HIDDEN, 1024),
    (2048, HIDDEN),
    (2048, HIDDEN),
    (HIDDEN, 2048),
)
HEAD_SHAPE = (262144, HIDDEN)


def random_weight(shape: tuple[int, int], generator: torch.Generator) -> BlockInt8Weight:
    """An int8 weight of Gaussian numbers; those with 1024 inputs carry offsets, as Q4_K does."""
    weight = quantize_int8("bench", torch.randn(*shape, generator=generator), group_size=32)
    if shape[1] != 1024:
        return weight
    return BlockInt8Weight("bench", weight.values, weight.scales * 1.0001, weight.scales.clone(), 32)


def time_products_ms(
    kernels: Kernels, inputs: dict[int, Tensor], weights: Sequence[Any], *, repeats: int
) -> tuple[float, float]:
    """(best, median) milliseconds of one pass over the weights, of `repeats` after two warm-ups."""
    times = []
    inputs_of_weights = [inputs[weight.shape[1]] for weight in weights]
    for repeat in range(repeats + 2):
        start = time.perf_counter()
        for rows, weight in zip(inputs_of_weights, weights, strict=True):
            kernels.linear(rows, weight)
        if repeat >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    return min(times), statistics.median(times)


def main() -> None:
    """Build the weights, time both kernel sets, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 16])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--no-torch", action="store_true", help="leave torch out: it needs 1.1 GB")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shapes = [*LAYER_SHAPES * NUM_LAYERS, HEAD_SHAPE]
    stored: list[PackedWeight] = [random_weight(shape, generator) for shape in shapes]
    inputs = {size: torch.randn(max(options.rows), size, generator=generator) for size in (HIDDEN, 1024, 2048)}

    kernels = load_cpu_kernels(cache_dir())
    start = time.perf_counter()
    packed = [kernels.pack(weight) for weight in stored]
    print(
        f"{kernels.num_threads} threads; packed {sum(w.storage.numel() for w in packed) / 1e6:.0f} MB "
        f"in {time.perf_counter() - start:.2f} s"
    )
    print("rows   best ms   median ms   ratio to 1 row   layers + head (median ms)")
    single = 0.0
    for rows in options.rows:
        x = {size: values[:rows].contiguous() for size, values in inputs.items()}
        best, median = time_products_ms(kernels, x, packed, repeats=options.repeats)
        _, layers = time_products_ms(kernels, x, packed[:-1], repeats=options.repeats)
        _, head = time_products_ms(kernels, x, packed[-1:], repeats=options.repeats)
        single = single or median
        print(f"{rows:4d} {best:9.2f} {median:11.2f} {median / single:16.2f}   {layers:.2f} + {head:.2f}")
    if not options.no_torch:
        reference = TorchKernels(torch.float32)
        dense = [reference.pack(weight) for weight in stored]
        x = {size: values[:1].contiguous() for size, values in inputs.items()}
        best, median = time_products_ms(reference, x, dense, repeats=5)
        print(f"torch float32, 1 row, {torch.get_num_threads()} threads: best {best:.1f} ms, median {median:.1f} ms")


if __name__ == "__main__":
    main()
