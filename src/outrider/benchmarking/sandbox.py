"""Runs code that a model wrote, in a process of its own with little to spend. Only for those who asked for it.

Limits on memory, processor time and file size hold for the child and cannot be raised by it; it has no
network where the system can do without root. It is no jail: it sees the file system as its user does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError

_BOOTSTRAP = """
import resource, sys
cpu_s, memory_bytes, mark = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
for name, most in (("CPU", cpu_s), ("AS", memory_bytes), ("FSIZE", 1 << 20), ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
with open(sys.argv[1]) as file:
    source = file.read()
del sys.argv[1:]
exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
sys.stdout.write(mark)
"""


@dataclass(frozen=True)
class Limits:
    """What one run may take."""

    timeout_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20


@dataclass(frozen=True)
class Ran:
    """How a run ended."""

    passed: bool
    """It came to its end: no exception, no exit before it."""
    reason: str
    """'passed', 'timed out', or the last line that it wrote about itself."""


def run_code(source: str, limits: Limits | None = None) -> Ran:
    """Run a program to its end; ConfigError on systems without resource limits.

    It passes if its last statement was reached: an exit code of 0 proves nothing, since a program may exit early.
    """
    if sys.platform == "win32":
        raise ConfigError("--allow-code-execution needs a system with resource limits, such as Linux or macOS.")
    limits = limits or Limits()
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.py"
        path.write_text(source, encoding="utf-8")
        numbers = [str(limits.cpu_s), str(limits.memory_bytes)]
        command = [*without_network(), sys.executable, "-I", "-c", _BOOTSTRAP, str(path), *numbers, mark]
        return _run(command, folder, mark, limits.timeout_s)


@functools.cache
def without_network() -> tuple[str, ...]:
    """The beginning of a command line that runs the rest in a network of its own; empty where that cannot be had."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, "--user", "--map-root-user", "--net", "--")
    tried = subprocess.run([*command, sys.executable, "-I", "-c", ""], capture_output=True, check=False)
    return command if tried.returncode == 0 else ()


def _run(command: list[str], folder: str, mark: str, timeout_s: float) -> Ran:
    """Start it in a session of its own, so that what it started ends with it."""
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    output = Path(folder) / "output"  # a file, so that RLIMIT_FSIZE bounds what it may write
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
            is_late = False
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
    if is_late:
        return Ran(False, "timed out")
    written = output.read_bytes().decode(errors="replace")
    if process.returncode == 0 and written.endswith(mark):
        return Ran(True, "passed")
    lines = [line for line in written.splitlines() if line.strip()]
    return Ran(False, lines[-1][:200] if lines else f"ended with exit code {process.returncode}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
