"""Which kernel set a machine gets, and what happens where nothing compiles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from outrider.errors import ConfigError
from outrider.kernels import compiler, ops
from outrider.kernels.cpu import CpuKernels, load_cpu_kernels
from outrider.kernels.ops import select_kernels
from outrider.kernels.reference import TorchKernels
from outrider.weights.packed import quantize_int8

FAILING_COMPILER = (sys.executable, "-c", "import sys; sys.exit('no such instruction')")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which nothing was compiled yet."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def test_torch_and_dtypes_that_only_torch_has(own_cache: Path) -> None:
    assert isinstance(select_kernels("torch", dtype=torch.float32, device="cpu"), TorchKernels)
    assert isinstance(select_kernels("auto", dtype=torch.float64, device="cpu"), TorchKernels)
    assert not list(own_cache.iterdir())


def test_unknown_kind_and_wrong_dtype_are_named() -> None:
    with pytest.raises(ConfigError, match="kernels='fast' is unknown; choose one of auto, cpu, gpu, torch"):
        select_kernels("fast", dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match="float32 on a CPU, not"):
        select_kernels("cpu", dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ConfigError, match=r"bfloat16 on CUDA, not torch\.float32 on cpu"):
        select_kernels("gpu", dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match=r"bfloat16 on CUDA, not torch\.float16 on cuda"):
        select_kernels("gpu", dtype=torch.float16, device="cuda")


def test_bfloat16_on_cuda_gets_the_triton_set(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = object()
    monkeypatch.setattr(ops, "load_gpu_kernels", lambda dtype, device: chosen)
    for kind in ("auto", "gpu"):
        assert select_kernels(kind, dtype=torch.bfloat16, device="cuda") is chosen
    assert isinstance(select_kernels("auto", dtype=torch.float16, device="cuda"), TorchKernels)


def test_without_triton_auto_warns_and_gpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outrider.kernels.gpu", None)
    with pytest.warns(UserWarning, match="falls back to torch products.*need Triton"):
        assert isinstance(select_kernels("auto", dtype=torch.bfloat16, device="cuda"), TorchKernels)
    with pytest.raises(ConfigError, match="need Triton"):
        select_kernels("gpu", dtype=torch.bfloat16, device="cuda")


def test_without_a_compiler_auto_warns_and_cpu_refuses(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_compilers", list)
    with pytest.warns(UserWarning, match=r"falls back to torch products.*`pip install ziglang`"):
        kernels = select_kernels("auto", dtype=torch.float32, device="cpu")
    assert isinstance(kernels, TorchKernels)
    with pytest.raises(ConfigError, match="no cc, gcc or clang"):
        select_kernels("cpu", dtype=torch.float32, device="cpu")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(own_cache: Path) -> None:
    with pytest.raises(ConfigError, match="no such instruction"):
        load_cpu_kernels(own_cache, [FAILING_COMPILER])
    assert not list((own_cache / "kernels").iterdir())


def test_the_next_compiler_is_tried(own_cache: Path) -> None:
    working = compiler.find_compilers()
    if not working:
        pytest.skip("no C compiler")
    assert isinstance(load_cpu_kernels(own_cache, [("no-such-compiler",), FAILING_COMPILER, working[0]]), CpuKernels)


def test_compiled_once_per_compiler_and_processor(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_compiler(name: str) -> tuple[str, ...]:
        return (
            sys.executable,
            "-c",
            "import pathlib, sys; pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).touch()",
            name,
        )

    first = compiler.compiled_library(fake_compiler("a"), cache_dir=own_cache)
    written = first.stat().st_mtime_ns
    assert compiler.compiled_library(fake_compiler("a"), cache_dir=own_cache) == first
    assert first.stat().st_mtime_ns == written
    assert compiler.compiled_library(fake_compiler("b"), cache_dir=own_cache) != first
    monkeypatch.setattr(compiler, "processor_flags", lambda: "another processor")
    assert compiler.compiled_library(fake_compiler("a"), cache_dir=own_cache) != first


@pytest.mark.slow
def test_zig_makes_the_same_kernels(own_cache: Path) -> None:
    zig = compiler.zig_compiler()
    if zig is None:
        pytest.skip("ziglang is not installed")
    kernels = load_cpu_kernels(own_cache, [zig])
    generator = torch.Generator().manual_seed(0)
    weight = quantize_int8("weight", torch.randn(130, 640, generator=generator), group_size=32)
    x = torch.randn(9, 640, generator=generator)
    packed = kernels.pack(weight)
    exact = TorchKernels(torch.float64)
    out = kernels.linear(x, packed)
    torch.testing.assert_close(out.double(), exact.linear(x.double(), exact.pack(weight)), rtol=0, atol=1e-4)
    for row in range(9):
        assert torch.equal(kernels.linear(x[row : row + 1], packed), out[row : row + 1])
    if others := [command for command in compiler.find_compilers() if command != zig]:
        system = load_cpu_kernels(own_cache, others)
        assert torch.equal(system.linear(x, system.pack(weight)), out)  # one order of operations, whoever compiles it


@pytest.mark.parametrize(
    ("variable", "value"), [("OUTRIDER_THREADS", "0"), ("OUTRIDER_THREADS", "abc"), ("OUTRIDER_CACHE", "/proc/no")]
)
def test_a_wrong_setting_is_no_reason_to_fall_back(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable}|{value}"):
        select_kernels("auto", dtype=torch.float32, device="cpu")
