"""Builds `cpu.c` once for this machine, with whatever C compiler there is, into Outrider's cache."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider.errors import ConfigError
from outrider.weights.locate import cache_folder

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS: tuple[str, ...] = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=off")
FLAGS += ("-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread")
SYSTEM_COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 300.0


class NotCompiledError(ConfigError):
    """No compiler on this machine makes the kernels; torch products are the way round it."""


def zig_compiler() -> tuple[str, ...] | None:
    """The command of the C compiler inside the `ziglang` package; None where it is not installed."""
    return (sys.executable, "-m", "ziglang", "cc") if importlib.util.find_spec("ziglang") else None


def find_compilers() -> list[tuple[str, ...]]:
    """Commands of the C compilers on this machine, the one to try first leading."""
    on_path = [(path,) for name in SYSTEM_COMPILERS if (path := shutil.which(name))]
    zig = zig_compiler()
    return [*on_path, zig] if zig else list(on_path)


def load_library(cache_dir: Path, compilers: list[tuple[str, ...]] | None = None) -> ctypes.CDLL:
    """cpu.c as a loaded library, compiled by the first of `compilers` that can; NotCompiledError where none can."""
    failures = []
    for compiler in find_compilers() if compilers is None else compilers:
        try:
            return ctypes.CDLL(str(compiled_library(compiler, cache_dir=cache_dir)))
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{' '.join(compiler)}: {_reason(error)}")
    if not failures:
        failures.append("there is no cc, gcc or clang on the PATH")
    raise NotCompiledError(
        f"The CPU kernels could not be compiled ({'; '.join(failures)}). Install a C compiler, for example with "
        "`pip install ziglang`, or use the torch kernels (--kernels torch)."
    )


def compiled_library(compiler: tuple[str, ...], *, cache_dir: Path) -> Path:
    """Path of the library that `compiler` makes of cpu.c for this processor; compiled where it is missing or damaged.

    A library's name ends in its own checksum: to map a damaged one would kill the process.
    """
    source = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("cpu*.[ch]")))
    facts = (*compiler, *FLAGS, platform.machine(), platform.system(), processor_flags())
    digest = hashlib.sha256(source + "\0".join(facts).encode()).hexdigest()
    folder, name = cache_dir / "kernels", digest[:32]
    with cache_folder(folder):
        for library in sorted(folder.glob(f"{name}-*.so")):
            if library.name == _library_name(name, library):
                return library
            library.unlink(missing_ok=True)
        # Compiled beside its final place and renamed, so that another process never loads half a file.
        handle, unfinished_name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        os.close(handle)
    unfinished = Path(unfinished_name)
    try:
        command = [*compiler, *FLAGS, "-o", unfinished_name, str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        with cache_folder(folder):
            return _publish(unfinished, folder / _library_name(name, unfinished))
    finally:
        unfinished.unlink(missing_ok=True)


def _library_name(name: str, library: Path) -> str:
    return f"{name}-{hashlib.sha256(library.read_bytes()).hexdigest()[:32]}.so"


def _publish(unfinished: Path, library: Path) -> Path:
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())  # or a power cut leaves the name without the bytes
    return unfinished.replace(library)


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What -march=native depends on: a cache on a shared disk may serve processors that differ."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.processor()


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr).strip().splitlines()
        return lines[-1] if lines else f"exit code {error.returncode}"
    return str(error)
