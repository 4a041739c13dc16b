"""Where a number was made: machine, versions and git state, stamped on every record and checkpoint.

Imports no torch. What only torch can tell (accelerators, its thread count) is read if the caller has imported it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

OUTRIDER_VERSION = "0.1.0"

PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "torch", "transformers", "triton")
CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "neon", "asimd", "asimddp")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
GIT_TIMEOUT_S = 10.0
_PACKAGE_DIR = Path(__file__).resolve().parent


def describe() -> dict[str, Any]:
    """The environment as a plain dict that JSON can hold. Names no host, user or path."""
    return {
        "outrider": OUTRIDER_VERSION,
        "git": git_state(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": cpu_model(),
        "cpu_features": cpu_features(),
        "num_cores": os.cpu_count(),
        "num_usable_cores": num_usable_cores(),
        "memory_bytes": memory_bytes(),
        "thread_variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "torch_num_threads": _torch_num_threads(),
        "accelerators": accelerators(),
    }


def package_version(name: str) -> str | None:
    """The installed version of a distribution, without importing it; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git_state(package_dir: Path = _PACKAGE_DIR) -> dict[str, Any] | None:
    """`{commit, dirty}` of the checkout this package runs from; None where it runs from somewhere else.

    A package installed under another project's checkout must not pass off that project's commit as ours.
    """
    top_level = _git(["rev-parse", "--show-toplevel"], package_dir)
    if top_level is None or Path(top_level).resolve() / "src" / package_dir.name != package_dir:
        return None
    status = _git(["status", "--porcelain"], package_dir)
    return {
        "commit": _git(["rev-parse", "--verify", "--quiet", "HEAD"], package_dir),
        "dirty": None if status is None else bool(status),
    }


def _git(arguments: list[str], directory: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's name as the kernel gives it; elsewhere what `platform` knows."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read(cpuinfo), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or None


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Which of the instruction sets that our kernels care about this processor has; empty where it cannot be read."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read(cpuinfo), re.MULTILINE)
    present = set(found.group(1).split()) if found else set()
    return [name for name in CPU_FEATURES if name in present]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def num_usable_cores() -> int | None:
    """Cores this process may run on, which a container or `taskset` can make fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def memory_bytes() -> int | None:
    """Physical memory of the machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _torch_num_threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def accelerators() -> list[dict[str, Any]]:
    """Name, memory and CUDA version of every visible GPU; empty if torch has not been imported or sees none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": device.name, "memory_bytes": device.total_memory, "cuda": torch.version.cuda} for device in devices
    ]
