"""Compiles Triton kernels for GPUs that are not here: `python -m tests.kernels.triton_compile 90 rms_norm` prints JSON.

A kernel is compiled as its wrapper launches it: the wrapper runs on tensors without numbers (device "meta") and the
launches are caught. This needs a process of its own where others interpret Triton.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

POINTER_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
SHARED_LIMITS_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}  # of one program
ROOT = Path(__file__).resolve().parents[2]


class Launch(NamedTuple):
    """A kernel and what it was launched with."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


def caught_launches(call: Callable[[], object]) -> list[Launch]:
    """What `call` launches, which is not run."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def catch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = list(inspect.signature(self.fn).parameters)
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        launches.append(Launch(self, dict(zip(names, args, strict=False)) | given, kwargs))

    run, JITFunction.run = JITFunction.run, catch
    try:
        call()
    finally:
        JITFunction.run = run
    return launches


def compiled(launch: Launch, architecture: int) -> dict[str, int]:
    """Shared bytes, registers a thread and spilled bytes a thread of a launch on sm_<architecture>."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        kind = _type_of(value, is_constant=param.is_constexpr)
        signature[param.name] = kind
        if kind == "constexpr":
            constants[index,] = value
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
    registers, spilled = _resources(binary.asm["cubin"])
    return {"shared": binary.metadata.shared, "registers": registers, "spilled": spilled}


def _type_of(value: Any, *, is_constant: bool) -> str:
    """As Triton specialises an argument: None and 1 become part of the kernel."""
    if is_constant or value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return POINTER_TYPES[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, as cuobjdump of Triton's own wheel counts them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2])


def compile_cases(architecture: int, names: Sequence[str]) -> dict[str, list[dict[str, int]]]:
    """Every launch of the named cases (all without a name), compiled in a process of its own."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(architecture), *names]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, list[dict[str, int]]] = json.loads(done.stdout)
    return results


def main() -> None:
    """Compile the named cases of `triton_cases` for an architecture and print what they take."""
    from tests.kernels.triton_cases import cases_for

    architecture, names = int(sys.argv[1]), sys.argv[2:]
    cases = cases_for(architecture)
    results = {
        name: [compiled(launch, architecture) for launch in caught_launches(call)]
        for name, call in cases.items()
        if not names or name in names
    }
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
